from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout.stepper import Step, Stepper
from tests.environments import MODES, Episode, Place, counters, places, reward

SCHEDULES = (
    (Episode(2, "truncated"), Episode(3, "truncated")),
    (Episode(2, "terminated"), Episode(3, "truncated")),
    (Episode(2, "both"), Episode(3, "truncated")),
    (Episode(9, "truncated"),),
)
ACTIONS = np.zeros(4, dtype=np.int64)


def start(mode: AutoresetMode) -> Stepper:
    stepper = Stepper(counters(mode, SCHEDULES))
    stepper.reset(seed=0)
    return stepper


def steps(stepper: Stepper, number: int) -> list[Step]:
    return [stepper.step(ACTIONS) for _ in range(number)]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_within_the_episodes_is_passed_on(mode: AutoresetMode) -> None:
    stepper = start(mode)
    assert places(stepper.observations) == [Place(row, 0, 0) for row in range(4)]
    step = stepper.step(ACTIONS)
    assert step.rewards.tolist() == [reward(Place(row, 0, 0)) for row in range(4)]
    assert not step.terminated.any()
    assert not step.truncated.any()
    assert not step.started.any()
    assert step.valid.all()
    assert step.final_observations is None
    assert places(stepper.observations) == [Place(row, 0, 1) for row in range(4)]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_an_ending_step_leads_to_the_next_episode(mode: AutoresetMode) -> None:
    stepper = start(mode)
    _, step = steps(stepper, 2)
    assert step.terminated.tolist() == [False, True, True, False]
    assert step.truncated.tolist() == [True, False, True, False]
    assert step.started.tolist() == [True, True, True, False]
    assert step.valid.all()
    assert places(stepper.observations) == [*(Place(row, 1, 0) for row in range(3)), Place(3, 0, 2)]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_only_truncated_rows_bring_their_final_observation(mode: AutoresetMode) -> None:
    _, step = steps(start(mode), 2)
    assert step.final_rows.tolist() == [0], "where both flags are set, termination wins"
    assert places(step.final_observations) == [Place(0, 0, 2)]


def test_next_step_mode_shows_the_final_observation_then_resets() -> None:
    stepper = start(AutoresetMode.NEXT_STEP)
    _, ending = steps(stepper, 2)
    assert ending.valid.all()
    assert not ending.started.any()
    assert ending.final_observations is None
    assert places(stepper.observations) == [Place(row, 0, 2) for row in range(4)]

    reset = stepper.step(ACTIONS)
    assert reset.valid.tolist() == [False, False, False, True]
    assert reset.started.tolist() == [True, True, True, False]
    assert not (reset.terminated | reset.truncated).any()
    assert places(stepper.observations) == [*(Place(row, 1, 0) for row in range(3)), Place(3, 0, 3)]

    after = stepper.step(ACTIONS)
    assert after.valid.all()
    assert not after.started.any()


@pytest.mark.parametrize("mode", MODES)
def test_reset_forgets_the_episodes_under_way(mode: AutoresetMode) -> None:
    stepper = start(mode)
    steps(stepper, 2)
    stepper.reset(seed=0)
    assert {place.step for place in places(stepper.observations)} == {0}
    assert stepper.step(ACTIONS).valid.all()


def test_disabled_final_observations_survive_an_environment_that_reuses_its_memory() -> None:
    stepper = Stepper(Reusing(2))
    stepper.reset()
    step = stepper.step(ACTIONS[:2])
    assert step.final_observations.tolist() == [[1.0], [1.0]]
    assert stepper.observations.tolist() == [[0.0], [0.0]]


class Reusing(VectorEnv[Any, Any, Any]):
    """Truncates every episode after one step, and writes all its observations to one array."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.memory = np.zeros((num_envs, 1))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.memory[...] = 0.0
        return self.memory, {}

    def step(self, actions: Any) -> Any:
        self.memory += 1.0
        never = np.zeros(self.num_envs, dtype=np.bool_)
        return self.memory, np.zeros(self.num_envs), never, ~never, {}


@pytest.mark.parametrize("mode", [None, "sometimes"])
def test_an_environment_must_say_how_it_resets(mode: str | None) -> None:
    env = counters(AutoresetMode.SAME_STEP)
    env.metadata = {} if mode is None else {"autoreset_mode": mode}
    with pytest.raises(ConfigurationError, match=r"SyncVectorEnv.*set metadata\[\"autoreset_mode\"\]"):
        Stepper(env)


def test_the_mode_may_be_given_by_its_value() -> None:
    env = counters(AutoresetMode.DISABLED)
    env.metadata = {"autoreset_mode": AutoresetMode.DISABLED.value}
    assert Stepper(env).autoreset_mode is AutoresetMode.DISABLED


def test_gymnasiums_vectorised_cart_pole_resets_in_the_next_step() -> None:
    env = gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    stepper = Stepper(env)
    stepper.reset(seed=0)
    ended = np.zeros(3, dtype=np.bool_)
    resets = 0
    for _ in range(60):
        step = stepper.step(np.ones(3, dtype=np.int64))
        np.testing.assert_array_equal(step.valid, ~ended)
        assert (np.abs(stepper.observations[~step.valid]) <= 0.05).all(), "where CartPole starts"
        resets += int((~step.valid).sum())
        ended = step.terminated | step.truncated
    assert resets > 6


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_an_environment_may_say_itself_which_episodes_begin(
    mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = start(mode)
    step, begin = stepper.env.step, np.array([False, True, False, True])
    monkeypatch.setattr(stepper.env, "step", lambda actions: (*step(actions)[:4], {"started": begin}))
    assert stepper.step(ACTIONS).started.tolist() == begin.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_masked_transitions_are_not_valid(mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = start(mode)
    step, masked = stepper.env.step, np.array([False, False, True, True])
    monkeypatch.setattr(stepper.env, "step", lambda actions: (*step(actions)[:4], {"masked": masked}))
    assert stepper.step(ACTIONS).valid.tolist() == [True, True, False, False]
