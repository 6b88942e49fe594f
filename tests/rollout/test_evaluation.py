from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from puffer_lightning.policies import Policy, State
from puffer_lightning.rollout import Episodes, play
from puffer_lightning.rollout.stepper import Stepper
from tests.environments import (
    MODES,
    Counter,
    Episode,
    KnownValues,
    Place,
    RunningSum,
    counters,
    places,
    reward,
)

# The second environment ends ten times as many episodes as the first.
SLOW_AND_FAST = ((Episode(20, "terminated"),), (Episode(2, "truncated"),))


def summed_rewards(row: int, episode: int, length: int) -> float:
    return sum(reward(Place(row, episode, step)) for step in range(length))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_episodes", [1, 2, 5, 8])
def test_plays_exactly_as_many_episodes_as_asked_for(mode: AutoresetMode, num_episodes: int) -> None:
    episodes = play(KnownValues(), counters(mode, SLOW_AND_FAST), num_episodes, seed=0)
    assert episodes.returns.shape == episodes.lengths.shape == (num_episodes,)
    assert (episodes.lengths > 0).all()
    assert episodes.trajectories == []


@pytest.mark.parametrize("mode", MODES)
def test_short_episodes_are_not_favoured(mode: AutoresetMode) -> None:
    episodes = play(KnownValues(), counters(mode, SLOW_AND_FAST), 6, seed=0)
    assert episodes.lengths.tolist() == [20, 2] * 3
    expected = [summed_rewards(row, episode, (20, 2)[row]) for episode in range(3) for row in range(2)]
    assert episodes.returns.tolist() == expected
    assert first_to_end(mode, 6) == [2] * 6, "what the well-known mistake would measure"


def first_to_end(mode: AutoresetMode, num_episodes: int) -> list[int]:
    """Lengths of the episodes that end first."""
    stepper = Stepper(counters(mode, SLOW_AND_FAST))
    stepper.reset()
    lengths: list[int] = []
    elapsed = np.zeros(2, dtype=np.int64)
    while len(lengths) < num_episodes:
        step = stepper.step(np.zeros(2, dtype=np.int64))
        elapsed += step.valid
        ended = step.terminated | step.truncated
        lengths += elapsed[ended].tolist()
        elapsed[ended] = 0
    return lengths[:num_episodes]


@pytest.mark.parametrize("mode", MODES)
def test_recorded_episodes_run_from_their_start_to_their_end(mode: AutoresetMode) -> None:
    episodes = play(KnownValues(), counters(mode, SLOW_AND_FAST), 5, seed=0, record=True)
    assert len(episodes.trajectories) == 5
    for index, trajectory in enumerate(episodes.trajectories):
        row, episode = index % 2, index // 2
        length = (20, 2)[row]
        assert places(trajectory.observations) == [Place(row, episode, step) for step in range(length)]
        assert trajectory.rewards.tolist() == [reward(Place(row, episode, step)) for step in range(length)]
        assert trajectory.actions.shape == (length,)
        assert trajectory.terminated == (row == 0)
        assert trajectory.rewards.sum() == episodes.returns[index]
        assert len(trajectory.rewards) == episodes.lengths[index]


class Nested(Counter):
    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"place": Counter.observation_space, "step": spaces.Box(0, 255, (1,), np.uint8)}
    )

    def observe(self) -> Any:
        return {"step": np.array([self.place.step], np.uint8), "place": super().observe()}


class OfPlace(KnownValues):
    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        return super().forward(observations["place"], state)


@pytest.mark.parametrize("mode", MODES)
def test_recorded_observations_may_be_nested(mode: AutoresetMode) -> None:
    episodes = play(OfPlace(), counters(mode, SLOW_AND_FAST, Nested), 2, seed=0, record=True)
    for trajectory, length in zip(episodes.trajectories, (20, 2), strict=True):
        assert trajectory.observations["step"].dtype == np.uint8
        assert trajectory.observations["step"].squeeze(-1).tolist() == list(range(length))
        assert trajectory.observations["place"].shape == (length, 3)


class Leaning(KnownValues):
    """Prefers the second action, with probability 0.8."""

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        _, values, state = super().forward(observations)
        return torch.tensor([0.2, 0.8]).log().expand(len(values), 2), values, state


def played(greedy: bool, seed: int = 0) -> list[int]:
    env = counters(MODES[0], [[Episode(50, "truncated")]] * 4)
    episodes = play(Leaning(), env, 8, seed=seed, greedy=greedy, record=True)
    return [int(action) for trajectory in episodes.trajectories for action in trajectory.actions]


def test_greedy_takes_the_mode() -> None:
    assert set(played(greedy=True)) == {1}


def test_sampled_follows_the_distribution() -> None:
    assert 0.7 < np.mean(played(greedy=False)) < 0.9


def test_sampling_follows_the_seed_alone() -> None:
    torch.manual_seed(0)
    one = played(greedy=False)
    torch.manual_seed(1)
    assert played(greedy=False) == one
    assert played(greedy=False, seed=1) != one


class Seeded(Counter):
    """Rewards with random numbers of its own."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, float(self.np_random.normal()), *rest)


def seeded(seed: int) -> Episodes:
    return play(KnownValues(), counters(MODES[0], SLOW_AND_FAST, Seeded), 4, seed=seed)


def test_the_same_seed_plays_the_same_episodes() -> None:
    assert seeded(1).returns.tolist() == seeded(1).returns.tolist()
    assert seeded(1).returns.tolist() != seeded(2).returns.tolist()


class Watching(RunningSum):
    """Fails where its memory is not that of the episode it acts in."""

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        step = observations[:, 2]
        assert torch.equal(state, step * (step + 1) / 2)
        return super().forward(observations, state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("greedy", [True, False])
def test_recurrent_state_restarts_with_each_episode(mode: AutoresetMode, greedy: bool) -> None:
    assert play(Watching(), counters(mode, SLOW_AND_FAST), 6, seed=0, greedy=greedy).lengths.sum() == 66


def test_a_policy_that_forgets_to_restart_is_caught_by_the_test_above() -> None:
    class Stubborn(Watching):
        def restart(self, state: State, started: Tensor) -> State:
            return state

    with pytest.raises(AssertionError):
        play(Stubborn(), counters(MODES[0], SLOW_AND_FAST), 6, seed=0)


def test_each_step_is_announced_after_the_reset_was() -> None:
    env = counters(AutoresetMode.SAME_STEP, ((Episode(4, "terminated"),),))
    frames: list[Place] = []
    play(KnownValues(), env, 2, seed=0, on_step=lambda: frames.append(shown(env)))
    assert frames == [Place(0, 0, step) for step in range(4)] + [Place(0, 1, step) for step in range(4)] + [
        Place(0, 2, 0)
    ]


def shown(env: SyncVectorEnv) -> Place:
    counter = env.envs[0]
    assert isinstance(counter, Counter)
    return counter.place


def test_plays_without_gradients() -> None:
    class Inspected(Leaning):
        def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
            assert not torch.is_grad_enabled()
            return super().forward(observations, state)

    policy: Policy = Inspected()
    assert len(play(policy, counters(MODES[0], SLOW_AND_FAST), 1, seed=0).returns) == 1
