"""Rollouts of environments that do not step together, against those of the same environments that do."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.envs import SharedMemoryVectorEnv
from puffer_lightning.envs.async_batches import Received
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Action, Policy, State, make_head, make_policy
from puffer_lightning.rollout import Collector, Overlap, OverlappedCollector, Rollout
from tests.environments import MODES, counters

NUM_ENVS, WORKERS = 12, 6
OVERLAPS: list[Overlap] = ["halves", "first_ready"]

# Restarts and masked transitions warn, and are meant to be here.
pytestmark = pytest.mark.filterwarnings("ignore::puffer_lightning.envs.shared_memory.EnvironmentFaultWarning")


class Diary(gym.Env[Any, Any]):
    """Whatever can be mistaken: all it says depends on seed and actions; episodes end at random, in all ways.

    Args:
        nap: Milliseconds that a step takes at the most.
    """

    observation_space = spaces.Dict(
        {
            "page": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "picture": spaces.Box(0, 255, (2, 2), np.uint8),
            "action_mask": spaces.MultiBinary(3),
        }
    )
    action_space = spaces.Discrete(3)

    def __init__(self, nap: float = 0.0) -> None:
        self.nap = nap

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.last = 0, 0
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        mask = self.np_random.integers(0, 2, 3).astype(np.int8)
        mask[self.np_random.integers(3)] = 1
        self.mask = mask
        return {
            "page": np.array([self.steps, self.last, self.np_random.random()], np.float32),
            "picture": self.np_random.integers(0, 256, (2, 2), np.uint8),
            "action_mask": mask,
        }

    def step(self, action: Any) -> Any:
        time.sleep(self.nap * np.random.default_rng().random() ** 4 / 1000)
        self.steps, self.last = self.steps + 1, int(action)
        observation, draw = self.observe(), self.np_random.random()
        if draw > 0.97:
            observation["page"][2] = np.nan
        return observation, draw + action, draw < 0.1, 0.05 < draw < 0.2, {"draw": draw} if draw > 0.5 else {}


class Remembering(Policy):
    """Row by row the same, whatever the other rows; its actions and values depend on all it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = make_head(1, Diary.action_space)

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        return {"seen": torch.full((num_envs, 2), 0.25, device=device)}

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        page, picture = observations["page"], observations["picture"].float()
        new = torch.stack((page[:, 0] + page[:, 1], page[:, 2] + picture[:, 0, 1] / 256.0), dim=1)
        seen = 0.5 * state["seen"] + new
        logits = torch.stack((seen[:, 0], seen[:, 1], seen[:, 0] - seen[:, 1]), dim=1)
        return logits, seen[:, 0] + 3.0 * seen[:, 1], {"seen": seen}


class Shuffled(SharedMemoryVectorEnv):
    """Hands over random workers of those that step, with their environments in random order."""

    random = np.random.default_rng(7)
    arrived: list[list[int]]

    def recv(self, env_ids: Any = None) -> Received:
        if env_ids is None:
            chosen = self.random.permutation(self._pending)[: self._batch_workers]
            env_ids = np.concatenate([self._slices[worker] for worker in chosen])
        received = super().recv(env_ids)
        order = self.random.permutation(len(env_ids))
        self.arrived = [*getattr(self, "arrived", []), received.env_ids[order].tolist()]
        return Received(*tree_map(lambda leaf: leaf[order], tuple(received)))


Make = Callable[..., SharedMemoryVectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SharedMemoryVectorEnv] = []

    def make(
        kind: type[SharedMemoryVectorEnv] = SharedMemoryVectorEnv, env: Any = Diary, **options: Any
    ) -> SharedMemoryVectorEnv:
        options = {"num_workers": WORKERS, "context": "fork", "max_faults": 10_000} | options
        made.append(kind(env, NUM_ENVS, on_non_finite="mask", **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def kept(rollout: Rollout) -> Rollout:
    """A copy that the next rollout does not overwrite."""
    copies = {
        entry.name: tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, getattr(rollout, entry.name)
        )
        for entry in fields(rollout)
    }
    return Rollout(**copies)


def rollouts(collector: Collector, policy: Policy, number: int = 4) -> list[Rollout]:
    return [kept(collector.collect(policy)) for _ in range(number)]


def assert_equal(ours: list[Rollout], theirs: list[Rollout]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for entry in fields(Rollout):
            if entry.name not in ("began", "seconds", "preempted_at"):
                pairs = zip(
                    tree_leaves(getattr(mine, entry.name)),
                    tree_leaves(getattr(other, entry.name)),
                    strict=True,
                )
                assert all(torch.equal(*pair) for pair in pairs), entry.name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", [1, 13])
@pytest.mark.parametrize("batch_size", [2, 6])
def test_no_order_of_arrival_changes_anything(
    mode: AutoresetMode, horizon: int, batch_size: int, make: Make
) -> None:
    """Bit for bit, of a policy whose rows do not depend on one another."""
    together = rollouts(Collector(make(autoreset_mode=mode), horizon, seed=1), Remembering())
    env = make(Shuffled, autoreset_mode=mode, batch_size=batch_size)
    shuffled = rollouts(OverlappedCollector(env, horizon, seed=1), Remembering())
    assert_equal(shuffled, together)
    assert isinstance(env, Shuffled)
    assert any(ids != sorted(ids) for ids in env.arrived)
    assert len(env.arrived) == 4 * horizon * NUM_ENVS // batch_size, "no step more than the rollouts have"
    if horizon > 1:
        assert not all(rollout.valid.all() for rollout in together)
        assert any((rollout.truncated & rollout.valid & ~rollout.terminated).any() for rollout in together)
        assert sum(len(rollout.episode_returns) for rollout in together) > NUM_ENVS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_duration_of_steps_changes_anything(mode: AutoresetMode, overlap: Overlap, make: Make) -> None:
    together = rollouts(Collector(make(autoreset_mode=mode), 9, seed=1), Remembering())
    env = make(env=partial(Diary, nap=3.0), autoreset_mode=mode, batch_size=NUM_ENVS // 2)
    assert_equal(rollouts(OverlappedCollector(env, 9, seed=1, overlap=overlap), Remembering()), together)


class Recording(SharedMemoryVectorEnv):
    """Remembers whom it was told to step."""

    sent: list[list[int]]

    def send(self, actions: Any, env_ids: Any = None) -> None:
        self.sent = [*getattr(self, "sent", []), list(env_ids)]
        super().send(actions, env_ids)


def test_halves_take_turns(make: Make) -> None:
    env = make(Recording)
    OverlappedCollector(env, 4, overlap="halves").collect(Remembering())
    assert isinstance(env, Recording)
    assert env.sent == [[*range(6)], [*range(6, 12)]] * 4


class Waiting(Diary):
    """Its first step takes until there is a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def step(self, action: Any) -> Any:
        while not self.file.exists():
            time.sleep(0.001)
        return super().step(action)


def test_who_is_slow_holds_nobody_up(tmp_path: Path, make: Make) -> None:
    """Environment 0 makes its first step when the others have made all of theirs."""
    acted = []

    class Counting(Remembering):
        def act(self, observations: Any, noise: Tensor, state: State = ()) -> Action:
            acted.append(len(noise))
            if len(acted) == 6 + 5 * 3:
                (tmp_path / "now").touch()
            return super().act(observations, noise, state)

    slow = [partial(Waiting, tmp_path / "now"), *[Diary] * (NUM_ENVS - 1)]
    env = make(Recording, slow, batch_size=2, step_timeout=60.0)
    OverlappedCollector(env, 4).collect(Counting())
    assert isinstance(env, Recording)
    assert acted == [2] * 24
    assert [*map(sorted, env.sent[-3:])] == [[0, 1]] * 3


def test_a_real_network_gives_the_same_rollouts_each_time_and_almost_those_of_stepping_together(
    make: Make,
) -> None:
    """Almost: a network rounds the rows of a half otherwise than the same rows among all."""
    found = {}
    for name, overlap in {"together": None, "once": "halves", "again": "halves"}.items():
        env = make(env="Acrobot-v1")
        torch.manual_seed(0)
        policy = make_policy(env.single_observation_space, env.single_action_space)
        found[name] = rollouts(
            OverlappedCollector(env, 30, 1, overlap=overlap) if overlap else Collector(env, 30, 1),
            policy,
        )
    assert_equal(found["once"], found["again"])
    for half, whole in zip(found["once"], found["together"], strict=True):
        assert torch.equal(half.actions, whole.actions)
        assert torch.equal(half.observations, whole.observations)
        for name in ("values", "next_values", "log_probs"):
            assert_close(getattr(half, name), getattr(whole, name))


def test_a_mask_that_leaves_nothing_names_its_environment(make: Make) -> None:
    class Stubborn(Diary):
        def step(self, action: Any) -> Any:
            observation, *others = super().step(action)
            observation["action_mask"][:] = 0
            return observation, *others

    env = make(env=[Diary] * 9 + [Stubborn] + [Diary] * 2, batch_size=6)
    with pytest.raises(ConfigurationError, match="action_mask of environment 9 masks"):
        OverlappedCollector(env, 20).collect(Remembering())


def test_environments_that_step_together_are_refused() -> None:
    for overlap in OVERLAPS:
        with pytest.raises(ConfigurationError, match=f"overlap is {overlap}, but SyncVectorEnv steps all"):
            OverlappedCollector(counters(AutoresetMode.SAME_STEP), 5, overlap=overlap)


def test_batches_that_do_not_fit_are_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=12 of its num_envs=12 .*let batch_size divide"):
        OverlappedCollector(make(), 5, overlap="first_ready")
    with pytest.raises(ConfigurationError, match="batch_size=8 of its num_envs=12"):
        OverlappedCollector(make(batch_size=8), 5, overlap="first_ready")


class Unordered(SharedMemoryVectorEnv):
    """Cannot wait for particular environments."""

    def recv(self) -> Received:
        return super().recv()


class Tensors(SharedMemoryVectorEnv):
    """Observes as a device-resident environment does."""

    def reset(self, **options: Any) -> Any:
        observations, infos = super().reset(**options)
        return tree_map(torch.as_tensor, observations), infos


def test_what_cannot_be_overlapped_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"Unordered cannot wait for particular .* first_ready"):
        OverlappedCollector(make(Unordered, batch_size=6), 5, overlap="halves")
    OverlappedCollector(make(Unordered, batch_size=6), 5, overlap="first_ready").collect(Remembering())
    with pytest.raises(ConfigurationError, match="observations of Tensors are tensors"):
        OverlappedCollector(make(Tensors, batch_size=6), 5)
