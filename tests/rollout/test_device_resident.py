"""Environments that take and return tensors: collected like all others, and without waiting for them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor
from torch.fx.experimental import _config
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.envs import make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import LSTMPolicy, Policy, make_policy
from puffer_lightning.rollout import Collector, Rollout, play
from tests.environments import MODES, SCHEDULES, Counter, KnownValues, RunningSum, counters
from tests.waiting import ReadsOfScalars, WaitsForTheDevice

FIELDS = ("observations", "actions", "values", "next_values", "rewards", "terminated", "truncated", "valid")


class InTorch(VectorEnv[Any, Any, Any]):
    """The counters behind an interface of tensors, in memory that each step overwrites."""

    def __init__(self, mode: AutoresetMode, tells_final: bool = True) -> None:
        self.inner = counters(mode)
        self.num_envs = self.inner.num_envs
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = Counter.observation_space
        self.single_action_space = Counter.action_space
        self.tells_final = tells_final
        self.memory: list[Tensor] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return torch.from_numpy(self.inner.reset(seed=seed)[0]).clone(), {}
        assert isinstance(mask, Tensor)
        if mask.any():
            observations, _ = self.inner.reset(options={"reset_mask": mask.numpy()})
            self.memory[0].copy_(torch.from_numpy(observations))
        return self.memory[0], {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, Tensor)
        *returned, infos = self.inner.step(actions.numpy())
        fresh = [torch.from_numpy(np.array(array)) for array in returned]
        self.memory = self.memory or [torch.empty_like(part) for part in fresh]
        for memory, part in zip(self.memory, fresh, strict=True):
            memory.copy_(part)
        if self.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP or not self.tells_final:
            return *self.memory, {}
        final = self.memory[0].clone()
        for row in np.flatnonzero(infos.get("_final_obs", np.zeros(self.num_envs))):
            final[row] = torch.from_numpy(infos["final_obs"][row])
        return *self.memory, {"final_obs": final}


def collect(env: VectorEnv[Any, Any, Any], horizon: int, policy: Policy) -> Iterator[Rollout]:
    collector = Collector(env, horizon, seed=5)
    for _ in range(-(-24 // horizon)):
        yield collector.collect(policy)


@pytest.mark.parametrize("policy", [KnownValues(), RunningSum()], ids=["feed-forward", "recurrent"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", [1, 2, 5, 24])
def test_a_rollout_is_that_of_the_same_environments_in_numpy(
    mode: AutoresetMode, horizon: int, policy: Policy
) -> None:
    cut_off = 0
    both = zip(collect(InTorch(mode), horizon, policy), collect(counters(mode), horizon, policy), strict=True)
    for found, expected in both:
        # What a step led to that terminated an episode is meaningless, and may differ.
        found.next_values[found.terminated] = expected.next_values[expected.terminated] = 0.0
        for name in (*FIELDS, "episode_returns", "episode_lengths"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for one, other in zip(tree_leaves(found.state), tree_leaves(expected.state), strict=True):
            assert torch.equal(one, other)
        cut_off += int((found.truncated & ~found.terminated).sum())
    assert cut_off > 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("record", [False, True])
def test_episodes_are_those_of_the_same_environments_in_numpy(mode: AutoresetMode, record: bool) -> None:
    def played(env: VectorEnv[Any, Any, Any]) -> Any:
        # The row whose episodes take 1000 steps is dealt none of these.
        return play(KnownValues(), env, 3, seed=0, greedy=False, record=record)

    found, expected = played(InTorch(mode)), played(counters(mode))
    np.testing.assert_array_equal(found.returns, expected.returns)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    assert len(found.trajectories) == len(expected.trajectories) == (3 if record else 0)
    for one, other in zip(found.trajectories, expected.trajectories, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        assert one.terminated == other.terminated


class Drifting(VectorEnv[Any, Any, Any]):
    """Ends and truncates episodes at random, all in tensors; asks nothing of them."""

    def __init__(self, mode: AutoresetMode) -> None:
        self.num_envs = 8
        self.mode = mode
        self.metadata = {"autoreset_mode": mode}
        self.generator = torch.Generator().manual_seed(0)

    def observe(self) -> Tensor:
        return torch.rand(8, 3, generator=self.generator)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.observe(), {}

    def step(self, actions: Tensor) -> Any:
        flags = torch.rand(2, 8, generator=self.generator) < 0.2
        infos = {"final_obs": self.observe()} if self.mode is AutoresetMode.SAME_STEP else {}
        return self.observe(), actions.float(), flags[0], flags[1], infos


def waits(mode: AutoresetMode, horizon: int) -> list[str]:
    collector = Collector(Drifting(mode), horizon)
    collector.collect(KnownValues())
    with WaitsForTheDevice() as python, ReadsOfScalars() as below:
        rollout = collector.collect(KnownValues())
    assert rollout.truncated.any()
    return python.waits + below.waits


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_waited_for_step_by_step(mode: AutoresetMode) -> None:
    few, many = waits(mode, 8), waits(mode, 64)
    assert few == many
    assert len(many) <= 8, many


def test_the_counters_of_waiting_see_a_collector_that_waits() -> None:
    collector = Collector(counters(AutoresetMode.SAME_STEP), 16)
    collector.collect(KnownValues())
    with WaitsForTheDevice() as python:
        collector.collect(KnownValues())
    assert len(python.waits) >= 16
    with ReadsOfScalars() as below:
        assert torch.ones(3).sum() == 3
        torch.ones(3)[torch.tensor([True, False, True])]
    assert below.waits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", ["TorchCartPole", "TorchBreakout", "TorchMemoryMaze"])
@pytest.mark.parametrize("make", [make_policy, LSTMPolicy], ids=lambda make: make.__name__)
def test_rollouts_stay_where_the_environments_are(
    make: Callable[..., Policy], env_id: str, mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's "meta" is a device that is not the CPU and holds no numbers: reading one there raises."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    env = make_vector_env(f"puffer/{env_id}-v0", 8, {"device": "meta", "autoreset_mode": mode})
    policy = make(env.single_observation_space, env.single_action_space).to("meta")
    # Where it asks which rows there are, after the last step, it is told all.
    with ReadsOfScalars() as below, _config.patch(meta_nonzero_assume_all_nonzero=True):
        rollout = Collector(env, 4, device="meta").collect(policy)
    assert len(below.waits) <= 3
    assert set(below.waits) <= {"nonzero"}
    leaves = [leaf for leaf in tree_leaves(vars(rollout)) if isinstance(leaf, Tensor)]
    assert {leaf.device.type for leaf in leaves} == {"meta"}


def test_evaluation_asks_now_and_then_whether_it_is_over() -> None:
    with WaitsForTheDevice() as python:
        episodes = play(KnownValues(), Drifting(AutoresetMode.SAME_STEP), 400, seed=0)
    steps = int(episodes.lengths.reshape(50, 8).sum(0).max())
    assert steps > 96
    assert python.waits.count("__bool__") == -(-steps // 32) + 1


@pytest.mark.parametrize("resident", [False, True])
def test_a_final_observation_that_is_lost_is_replaced_by_the_one_before_it(resident: bool) -> None:
    env: VectorEnv[Any, Any, Any] = InTorch(AutoresetMode.SAME_STEP, tells_final=False)
    if not resident:
        env = Silent()
    with pytest.warns(UserWarning, match="truncates episodes without"):
        [rollout] = collect(env, 24, KnownValues())
    cut = rollout.truncated & ~rollout.terminated
    assert cut.sum() > 6
    assert torch.equal(rollout.next_values[cut], rollout.values[cut])
    [right] = collect(counters(AutoresetMode.SAME_STEP), 24, KnownValues())
    assert torch.equal(rollout.next_values[~rollout.truncated], right.next_values[~right.truncated])


class Silent(VectorEnv[Any, Any, Any]):
    """SAME_STEP counters in numpy that keep final observations to themselves."""

    def __init__(self) -> None:
        self.inner = counters(AutoresetMode.SAME_STEP)
        self.num_envs, self.metadata = self.inner.num_envs, self.inner.metadata

    def reset(self, **options: Any) -> Any:
        return self.inner.reset(**options)

    def step(self, actions: Any) -> Any:
        return *self.inner.step(actions)[:4], {}


class Nested(InTorch):
    """Observations in parts, the final ones with their keys in another order."""

    def reset(self, **options: Any) -> Any:
        return self._nested(super().reset(**options)[0]), {}

    def step(self, actions: Any) -> Any:
        observations, *rest, infos = super().step(actions)
        final = {key: self._nested(value, swapped=True) for key, value in infos.items()}
        return self._nested(observations), *rest, final

    def _nested(self, observations: Tensor, swapped: bool = False) -> Any:
        parts = {"place": observations, "step": (observations[:, 2].to(torch.uint8),)}
        return dict(reversed(parts.items())) if swapped else parts


class OfPlace(KnownValues):
    def forward(self, observations: Any, state: Any = ()) -> Any:
        assert torch.equal(observations["place"][:, 2].to(torch.uint8), observations["step"][0])
        return super().forward(observations["place"], state)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_observations_may_be_nested_and_keep_their_dtypes(mode: AutoresetMode) -> None:
    [found], [expected] = collect(Nested(mode), 24, OfPlace()), collect(counters(mode), 24, KnownValues())
    assert tree_map(lambda leaf: leaf.dtype, found.observations) == {
        "place": torch.float32,
        "step": (torch.uint8,),
    }
    keep = ~found.terminated
    assert torch.equal(found.next_values[keep], expected.next_values[keep])
    assert len(SCHEDULES) == found.num_envs


class Hybrid(InTorch):
    """Takes actions in parts, and keeps them."""

    def __init__(self, mode: AutoresetMode) -> None:
        super().__init__(mode)
        self.single_action_space = spaces.Dict(go=spaces.Discrete(2, start=5), aim=spaces.Box(-1, 1, (2,)))
        self.taken: list[Any] = []

    def step(self, actions: Any) -> Any:
        self.taken.append(tree_map(torch.clone, actions))
        return super().step(actions["go"] - 5)


@pytest.mark.parametrize("mode", MODES)
def test_actions_may_be_nested(mode: AutoresetMode) -> None:
    env = Hybrid(mode)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    [rollout] = collect(env, 24, policy)
    expected = policy.head.to_env(rollout.actions)
    assert expected.keys() == {"go", "aim"}
    for key, leaf in expected.items():
        assert torch.equal(torch.stack([actions[key] for actions in env.taken]), leaf)
    for trajectory in play(policy, Hybrid(mode), 3, seed=0, greedy=False, record=True).trajectories:
        assert trajectory.actions["go"].min() >= 5
        assert trajectory.actions["aim"].shape == (len(trajectory.rewards), 2)


class Masking(InTorch):
    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {"action_mask": torch.ones(self.num_envs, 2, dtype=torch.bool)}


def test_action_masks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="device-resident environments cannot be masked"):
        Collector(Masking(AutoresetMode.SAME_STEP), 4)
