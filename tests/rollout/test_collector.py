"""The Collector against an environment and a policy of which every number is known beforehand."""

from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.envs import make_vector_env
from puffer_lightning.functional import gae
from puffer_lightning.policies import Action, MLPPolicy, Policy, State, make_policy
from puffer_lightning.rollout import Collector, Rollout
from tests.environments import (
    MODES,
    SCHEDULES,
    Counter,
    KnownValues,
    Place,
    RunningSum,
    counters,
    places,
    reward,
    value,
)

GAMMA, GAE_LAMBDA = 0.9, 0.8
ROLLOUT_STEPS = 24

# Rollouts of these lengths cut the episodes everywhere: before, at and after each end and each reset step.
HORIZONS = [1, 2, 3, 5, 24]


def collect_all(
    mode: AutoresetMode, horizon: int, policy: Policy | None = None, kind: type[Counter] = Counter
) -> Iterator[Rollout]:
    collector = Collector(counters(mode, kind=kind), horizon)
    policy = policy or KnownValues()
    for _ in range(-(-ROLLOUT_STEPS // horizon)):
        yield collector.collect(policy)


def rows_of(rollout: Rollout, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Place, validity and further tensors' entries of each step, environment by environment."""
    for n in range(rollout.num_envs):
        at = places(rollout.observations[:, n])
        yield from zip(at, rollout.valid[:, n].tolist(), *(x[:, n].tolist() for x in tensors), strict=True)


def after(place: Place) -> Place:
    return place._replace(step=place.step + 1)


def ending(place: Place) -> str | None:
    """How the episode ends with this step; None if it goes on."""
    schedule = SCHEDULES[place.row]
    length, how = schedule[place.episode % len(schedule)]
    return how if place.step == length - 1 else None


def length_of(place: Place) -> int:
    schedule = SCHEDULES[place.row]
    return schedule[place.episode % len(schedule)].length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_every_valid_row_is_a_step_of_the_environment(mode: AutoresetMode, horizon: int) -> None:
    for rollout in collect_all(mode, horizon):
        columns = rollout.rewards, rollout.terminated, rollout.truncated, rollout.values
        for place, valid, earned, terminated, truncated, estimate in rows_of(rollout, *columns):
            assert estimate == value(place)
            if valid:
                assert earned == reward(place)
                assert terminated == (ending(place) in ("terminated", "both"))
                assert truncated == (ending(place) in ("truncated", "both"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_no_step_is_left_out_or_counted_twice(mode: AutoresetMode, horizon: int) -> None:
    seen: list[list[Place]] = [[] for _ in SCHEDULES]
    for rollout in collect_all(mode, horizon):
        for place, valid in rows_of(rollout):
            if valid:
                seen[place.row].append(place)
    for row, steps in enumerate(seen):
        expected = [Place(row, 0, 0)]
        while len(expected) < len(steps):
            last = expected[-1]
            expected.append(Place(row, last.episode + 1, 0) if ending(last) else after(last))
        assert steps == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_only_next_step_mode_has_reset_steps_which_are_not_valid(mode: AutoresetMode, horizon: int) -> None:
    resets = 0
    for rollout in collect_all(mode, horizon):
        for place, valid, terminated, truncated in rows_of(rollout, rollout.terminated, rollout.truncated):
            assert valid == (place.step < length_of(place)), "an action on a final observation is ignored"
            if not valid:
                resets += 1
                assert not terminated
                assert not truncated
    assert (resets > 0) == (mode is AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_next_values_are_those_of_the_observation_each_step_led_to(mode: AutoresetMode, horizon: int) -> None:
    """Of the final one where the episode was truncated; also at the last step of a rollout."""
    endings = set()
    for rollout in collect_all(mode, horizon):
        for place, valid, following in rows_of(rollout, rollout.next_values):
            if valid and ending(place) in (None, "truncated"):
                assert following == value(after(place)), place
                endings.add(ending(place))
    assert endings == {None, "truncated"}


def steps_with_advantages(mode: AutoresetMode, horizon: int, gae_lambda: float) -> dict[Place, float]:
    found: dict[Place, float] = {}
    for rollout in collect_all(mode, horizon):
        advantages = gae(
            rollout.rewards,
            rollout.values,
            rollout.next_values,
            rollout.terminated,
            rollout.truncated,
            GAMMA,
            gae_lambda,
        )
        found |= {place: advantage for place, valid, advantage in rows_of(rollout, advantages) if valid}
    return found


def known_advantage(place: Place, gae_lambda: float) -> float:
    """Equation 16 of arXiv 1506.02438, from the schedule alone and without end of the rollout."""
    how = ending(place)
    future = 0.0 if how in ("terminated", "both") else value(after(place))
    delta = reward(place) + GAMMA * future - value(place)
    return (
        delta
        if how or not gae_lambda
        else delta + GAMMA * gae_lambda * known_advantage(after(place), gae_lambda)
    )


def whole_episodes(steps: dict[Place, float]) -> dict[Place, float]:
    ends = {(place.row, place.episode) for place in steps if ending(place)}
    return {place: advantage for place, advantage in steps.items() if (place.row, place.episode) in ends}


def test_all_autoreset_modes_give_the_advantages_known_from_the_schedule() -> None:
    found = [whole_episodes(steps_with_advantages(mode, ROLLOUT_STEPS, GAE_LAMBDA)) for mode in MODES]
    common = set.intersection(*map(set, found))
    assert len({(place.row, place.episode) for place in common}) > 12
    for place in common:
        expected = pytest.approx(known_advantage(place, GAE_LAMBDA), abs=1e-4)
        assert [steps[place] for steps in found] == [expected] * 3, place


@pytest.mark.parametrize("horizon", HORIZONS)
def test_the_modes_agree_wherever_rollouts_are_cut(horizon: int) -> None:
    found = [steps_with_advantages(mode, horizon, gae_lambda=0.0) for mode in MODES]
    common = set.intersection(*map(set, found))
    assert len(common) > 2 * ROLLOUT_STEPS
    for place in common:
        expected = pytest.approx(known_advantage(place, 0.0), abs=1e-4)
        assert [steps[place] for steps in found] == [expected] * 3, place


@pytest.mark.parametrize("mode", MODES)
def test_the_well_known_mistakes_give_other_advantages(mode: AutoresetMode) -> None:
    [rollout] = collect_all(mode, ROLLOUT_STEPS)
    ended = rollout.terminated | rollout.truncated
    never = torch.zeros_like(ended)
    off_by_one = torch.cat((rollout.values[1:], rollout.next_values[-1:]))
    variants = {
        "right": (rollout.next_values, rollout.terminated, rollout.truncated),
        "done instead of terminated": (rollout.next_values, ended, never),
        "truncation ignored": (rollout.next_values, rollout.terminated, never),
        "bootstrap from the next row": (off_by_one, rollout.terminated, rollout.truncated),
    }
    wrong = set()
    for name, arguments in variants.items():
        advantages = gae(rollout.rewards, rollout.values, *arguments, GAMMA, GAE_LAMBDA)
        steps = {place: advantage for place, valid, advantage in rows_of(rollout, advantages) if valid}
        for place, advantage in whole_episodes(steps).items():
            if advantage != pytest.approx(known_advantage(place, GAE_LAMBDA), abs=1e-4):
                wrong.add(name)
    # In NEXT_STEP mode the next row does hold the final observation.
    assert wrong == set(variants) - {"right"} - (
        {"bootstrap from the next row"} if mode is AutoresetMode.NEXT_STEP else set()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_episode_returns_and_lengths_leave_reset_steps_out(mode: AutoresetMode, horizon: int) -> None:
    found: list[tuple[float, float]] = []
    ends: list[Place] = []
    for rollout in collect_all(mode, horizon):
        found += zip(rollout.episode_returns.tolist(), rollout.episode_lengths.tolist(), strict=True)
        for t in range(horizon):
            at = zip(places(rollout.observations[t]), rollout.valid[t], strict=True)
            ends += [place for place, valid in at if valid and ending(place)]
    assert len(ends) > 12
    for end, (episode_return, episode_length) in zip(ends, found, strict=True):
        assert episode_length == end.step + 1
        assert episode_return == sum(reward(end._replace(step=step)) for step in range(end.step + 1))


def running_sum(place: Place) -> float:
    """What :class:`RunningSum` holds once it saw the observation at ``place``."""
    return (place.step + 1) * (place.step + 2) / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_recurrent_state_restarts_with_each_episode_and_not_before(mode: AutoresetMode, horizon: int) -> None:
    """The final observation is valued with the state of the episode that it ends."""
    cut_off = 0
    for rollout in collect_all(mode, horizon, RunningSum()):
        for place, valid, estimate, following in rows_of(rollout, rollout.values, rollout.next_values):
            assert estimate == running_sum(place)
            if valid and ending(place) in (None, "truncated"):
                assert following == running_sum(after(place)), place
                cut_off += ending(place) is not None
    assert cut_off > 6


@pytest.mark.parametrize("mode", MODES)
def test_the_state_before_the_first_step_is_kept_with_the_rollout(mode: AutoresetMode) -> None:
    for rollout in collect_all(mode, 5, RunningSum()):
        for n, place in enumerate(places(rollout.observations[0])):
            assert rollout.state[n].item() == running_sum(place) - place.step - 1


class Extreme(Counter):
    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, (-1.0) ** self.place.step * 1e6, terminated, truncated, info


def test_rewards_are_never_clamped() -> None:
    [rollout] = collect_all(AutoresetMode.SAME_STEP, ROLLOUT_STEPS, kind=Extreme)
    assert rollout.rewards.min().item() == -1e6
    assert rollout.rewards.max().item() == 1e6


class Sloppy(Counter):
    """Returns float64 where its space says float32, as many environments do."""

    def observe(self) -> Any:
        return super().observe().astype(np.float64)


class Particular(KnownValues):
    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        assert observations.dtype == torch.float32
        return super().forward(observations, state)


@pytest.mark.parametrize("mode", MODES)
def test_final_observations_have_the_dtype_of_all_others(mode: AutoresetMode) -> None:
    [rollout] = collect_all(mode, ROLLOUT_STEPS, Particular(), Sloppy)
    assert rollout.observations.dtype == torch.float32


class Camera(Counter):
    """A place, as an observation with parts of several dtypes."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "place": spaces.Tuple((Counter.observation_space, spaces.Discrete(2000))),
            "exact": spaces.Box(0, 1e9, (), np.float64),
        }
    )

    def observe(self) -> Any:
        step = self.place.step
        return {
            "exact": np.asarray(1e8 + step + 0.25),
            "image": np.full((2, 2), step, np.uint8),
            "place": (super().observe(), step),
        }


class CameraValues(KnownValues):
    """Takes its values from all parts of the observation, so that no part may be of another step."""

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        place, step = observations["place"]
        parts = observations["image"][:, 0, 1], observations["exact"] - 1e8 - 0.25, step
        assert all(torch.equal(part.double(), place[:, 2].double()) for part in parts)
        return super().forward(place, state)


@pytest.mark.parametrize("mode", MODES)
def test_observations_may_be_nested_and_keep_their_dtypes(mode: AutoresetMode) -> None:
    for rollout in collect_all(mode, 5, CameraValues(), Camera):
        place, step = rollout.observations["place"]
        dtypes = {
            "image": rollout.observations["image"].dtype,
            "exact": rollout.observations["exact"].dtype,
            "place": place.dtype,
            "step": step.dtype,
        }
        assert dtypes == {
            "image": torch.uint8,
            "exact": torch.float64,
            "place": torch.float32,
            "step": torch.int64,
        }
        assert rollout.observations["image"].shape == (5, 4, 2, 2)
        for n in range(4):
            columns = places(place[:, n]), rollout.valid[:, n].tolist(), rollout.next_values[:, n].tolist()
            for at, valid, following in zip(*columns, strict=True):
                if valid and ending(at) in (None, "truncated"):
                    assert following == value(after(at))


class Box(gym.Env[Any, Any]):
    """Observes its own random numbers, and remembers what it was told to do."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-0.1, 0.1, (3,), np.float32)

    def __init__(self) -> None:
        self.actions: list[Any] = []

    def observe(self) -> Any:
        return self.np_random.normal(size=2).clip(-9, 9).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action.copy())
        return self.observe(), 1.0, False, len(self.actions) % 7 == 0, {}


def boxes(num_envs: int = 2) -> SyncVectorEnv:
    return SyncVectorEnv([Box] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return make_policy(Box.observation_space, Box.action_space)


def test_the_environment_gets_the_actions_that_fit_it_and_the_rollout_those_that_were_drawn(
    policy: Policy,
) -> None:
    env = boxes()
    rollout = Collector(env, 5).collect(policy)
    given = np.stack([[*row.actions] for row in env.envs], axis=1)  # type: ignore[attr-defined]
    assert_close(torch.from_numpy(given), policy.head.to_env(rollout.actions), rtol=0, atol=0)
    assert rollout.actions.abs().max() > 0.1
    assert np.abs(given).max() <= np.float32(0.1)


def test_log_probs_and_values_are_those_that_an_update_starts_from(policy: Policy) -> None:
    rollout = Collector(boxes(), 5).collect(policy)
    log_probs, _, values = policy.evaluate(rollout.observations.flatten(0, 1), rollout.actions.flatten(0, 1))
    assert_close(rollout.log_probs.flatten(), log_probs.detach())
    assert_close(rollout.values.flatten(), values.detach())


def test_a_rollout_carries_no_gradient(policy: Policy) -> None:
    rollout = Collector(boxes(), 5).collect(policy)
    assert not any(x.requires_grad for x in (rollout.log_probs, rollout.values, rollout.next_values))


def test_the_memory_of_a_rollout_is_used_again(policy: Policy) -> None:
    collector = Collector(boxes(), 5)
    first = collector.collect(policy)
    before = first.actions.clone()
    second = collector.collect(policy)
    assert second.actions.data_ptr() == first.actions.data_ptr()
    assert not torch.equal(second.actions, before)


def test_the_policy_may_be_acted_for(policy: Policy) -> None:
    calls = []

    def act(observations: Any, noise: Tensor, state: State, values: bool = True) -> Action:
        calls.append(noise.clone())
        return policy.act(observations, noise, state, values)

    stood_in = Collector(boxes(), 5).collect(policy, act)
    assert len(calls) == 5
    assert len({tuple(noise.flatten().tolist()) for noise in calls}) == 5, "each step has noise of its own"
    assert torch.equal(stood_in.actions, Collector(boxes(), 5).collect(policy).actions)


def test_values_of_a_separate_critic_are_computed_after_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puffer_lightning.rollout.collector.CACHED_ROWS", 7)
    env = make_vector_env("Acrobot-v1", 4, {"max_episode_steps": 5})
    torch.manual_seed(0)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    together = MLPPolicy(env.single_observation_space, env.single_action_space)
    together.load_state_dict(policy.state_dict())
    together.separate_critic = False
    again = make_vector_env("Acrobot-v1", 4, {"max_episode_steps": 5})
    one, other = Collector(env, 12, seed=3).collect(policy), Collector(again, 12, seed=3).collect(together)
    assert one.truncated.any()
    assert torch.equal(one.actions, other.actions)
    for name in ("log_probs", "values", "next_values"):
        assert_close(getattr(one, name), getattr(other, name))


def test_a_seed_gives_a_rollout_and_another_seed_another(policy: Policy) -> None:
    torch.manual_seed(1)
    one = Collector(boxes(), 5, seed=3).collect(policy)
    torch.manual_seed(2)
    same = Collector(boxes(), 5, seed=3).collect(policy)
    other = Collector(boxes(), 5, seed=4).collect(policy)
    assert torch.equal(one.observations, same.observations)
    assert torch.equal(one.actions, same.actions)
    assert not torch.equal(one.observations, other.observations)
    assert not torch.equal(one.actions, other.actions)


def test_actions_depend_on_their_step_and_environment_and_not_on_the_others(policy: Policy) -> None:
    rollout = Collector(boxes(), 40, seed=3).collect(policy)
    noise = rollout.actions.flatten(1)
    assert len(set(noise.flatten().tolist())) == noise.numel()


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, env: SyncVectorEnv) -> Collector:
    monkeypatch.setattr(import_module("puffer_lightning.rollout.collector"), "rank", lambda: rank)
    return Collector(env, 5, seed=3)


def test_ranks_continue_each_others_environments_and_draw_actions_of_their_own(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    together, *parts = boxes(4), boxes(2), boxes(2)
    on_rank(monkeypatch, 0, together)
    rollouts = [on_rank(monkeypatch, rank, env).collect(policy) for rank, env in enumerate(parts)]
    seeds = [[row.seed for row in env.envs] for env in (together, *parts)]  # type: ignore[attr-defined]
    assert seeds[0] == [*chain(*seeds[1:])]
    assert len(set(seeds[0])) == 4
    assert not torch.equal(rollouts[0].actions, rollouts[1].actions)


def test_the_time_of_a_rollout_is_that_of_its_collection(policy: Policy) -> None:
    collector = Collector(boxes(), 5)
    first = collector.collect(policy)
    began, seconds = first.began, first.seconds
    second = collector.collect(policy)
    assert seconds > 0
    assert second.began >= began + seconds
