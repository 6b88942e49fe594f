"""Rollouts and episodes of nested spaces and masked actions."""

from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.envs import SharedMemoryVectorEnv
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import MaskedObservations, Policy, make_policy
from puffer_lightning.ppo import Learner, PPOConfig
from puffer_lightning.rollout import Collector, play
from puffer_lightning.rollout.stepper import Stepper
from tests.environments import MODES
from tests.policies.nested_spaces import ACTION_SPACES, OBSERVATION_SPACES

Where = Literal["observation", "info"]
LENGTH = 5


class Sampled(gym.Env[Any, Any]):
    """Observes random members of a space; episodes of ``LENGTH`` steps, terminated and truncated in turn."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.seen: list[Any] = []
        self.taken: list[Any] = []
        self.episode = 0

    def observe(self) -> Any:
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.steps += 1
        over = self.steps == LENGTH
        return self.observe(), 1.0, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


def sampled(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], mode: AutoresetMode
) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Sampled(observation_space, action_space)] * 2, autoreset_mode=mode)


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


@pytest.mark.parametrize("mode", MODES)
@given(OBSERVATION_SPACES, ACTION_SPACES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rollout_of_any_spaces_holds_what_was_seen_and_done_and_can_be_trained_on(
    mode: AutoresetMode, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    env = sampled(observation_space, action_space, mode)
    policy = make_policy(observation_space, action_space)
    rollout = Collector(env, horizon=8).collect(policy)
    given_to_env = tree_map(lambda leaf: leaf.numpy(), policy.head.to_env(rollout.actions))
    for row, one in enumerate(env.envs):
        assert isinstance(one, Sampled)
        acted = [t for t in range(8) if rollout.valid[t, row]]
        for t, action in zip(acted, one.taken, strict=True):
            assert equal(tree_map(lambda leaf, at=(t, row): leaf[at], given_to_env), action)
        # The first of an episode's observations are rows; the last one is where the mode puts it.
        for t in range(LENGTH):
            seen = tree_map(lambda leaf, at=(t, row): leaf[at].numpy(), rollout.observations)
            assert equal(seen, one.seen[t])
    learner = Learner(policy, PPOConfig(num_minibatches=2, update_epochs=1), seed=0)
    metrics = learner.learn(rollout, torch.optim.Adam(policy.parameters(), lr=1e-3))
    assert np.isfinite(metrics["train/policy_loss"])
    assert metrics["train/clip_fraction"] <= 1
    env.close()


def test_hybrid_episodes_are_recorded_with_their_nesting() -> None:
    observation_space = spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Tuple([spaces.Discrete(3)]))
    action_space = spaces.Dict(move=spaces.Discrete(3, start=5), aim=spaces.Box(-1.0, 1.0, (2,)))
    env = sampled(observation_space, action_space, AutoresetMode.SAME_STEP)
    episodes = play(make_policy(observation_space, action_space), env, 4, seed=0, greedy=False, record=True)
    for trajectory in episodes.trajectories:
        assert trajectory.actions["move"].shape == (LENGTH,)
        assert trajectory.actions["move"].min() >= 5
        assert trajectory.actions["aim"].shape == (LENGTH, 2)
        assert trajectory.observations["b"][0].shape == (LENGTH,)


class Masked(gym.Env[Any, Any]):
    """Allows one of three actions at a time, untold by its observation; ends with nothing allowed."""

    action_space = spaces.Discrete(3, start=1)

    def __init__(self, where: Where, row: int = 0, blocked_at: int | None = None) -> None:
        self.where, self.row, self.blocked_at = where, row, blocked_at
        box = spaces.Box(-1.0, 1.0, (2,))
        in_observation = spaces.Dict(x=box, action_mask=spaces.MultiBinary(3))
        self.observation_space = in_observation if where == "observation" else box
        self.taken: list[tuple[int, int]] = []
        self.episode = 0

    def observe(self, over: bool = False) -> Any:
        self.only = int(self.np_random.integers(3))
        mask = np.zeros(3, np.int8)
        if not over and self.steps != self.blocked_at:
            mask[self.only] = 1
        x = self.np_random.random(2, dtype=np.float32)
        if self.where == "observation":
            return {"x": x, "action_mask": mask}, {}
        return x, {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.observe()

    def step(self, action: Any) -> Any:
        self.taken.append((int(action), self.only + 1))
        self.steps += 1
        # Rows end together and apart.
        over = self.steps == 2 + (self.episode + self.row) % 4
        observation, info = self.observe(over)
        return observation, 1.0, over and self.episode % 2 == 0, over and self.episode % 2 == 1, info


def masked(where: Where, mode: AutoresetMode, blocked: int | None = None) -> SyncVectorEnv:
    makers = [lambda row=row: Masked(where, row, 1 if row == blocked else None) for row in range(3)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def policy_for(env: SyncVectorEnv) -> Policy:
    torch.manual_seed(0)
    return make_policy(env.single_observation_space, env.single_action_space)


def taken(env: SyncVectorEnv) -> list[tuple[int, int]]:
    return [pair for one in env.envs if isinstance(one, Masked) for pair in one.taken]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["observation", "info"])
class TestMasks:
    def test_only_allowed_actions_are_taken_and_stored_with_their_mask(
        self, where: Where, mode: AutoresetMode
    ) -> None:
        env = masked(where, mode)
        policy = policy_for(env)
        collector = Collector(env, horizon=16)
        for _ in range(2):
            rollout = collector.collect(policy)
            assert isinstance(rollout.observations, MaskedObservations)
            allowed = rollout.observations.action_mask.gather(-1, rollout.actions.unsqueeze(-1))
            assert allowed.all()
            # Of one action that is allowed the probability is 1.
            assert (rollout.log_probs[rollout.valid] == 0).all()
            assert (rollout.observations.action_mask.sum(-1)[rollout.valid] == 1).all()
        assert len(taken(env)) > 60
        assert all(action == only for action, only in taken(env))

    def test_values_are_those_without_a_mask(self, where: Where, mode: AutoresetMode) -> None:
        env = masked(where, mode)
        policy = policy_for(env)
        rollout = Collector(env, horizon=16).collect(policy)
        values = policy.value(tree_map(lambda leaf: leaf.flatten(0, 1), rollout.observations.observations))
        torch.testing.assert_close(rollout.values.flatten(), values)
        assert rollout.truncated.any()
        assert rollout.next_values.isfinite().all()

    def test_an_update_starts_where_the_rollout_was(self, where: Where, mode: AutoresetMode) -> None:
        env = masked(where, mode)
        policy = policy_for(env)
        rollout = Collector(env, horizon=16).collect(policy)
        learner = Learner(policy, PPOConfig(num_minibatches=1, update_epochs=1), seed=0)
        metrics = learner.learn(rollout, torch.optim.Adam(policy.parameters(), lr=1e-3))
        assert metrics["train/approx_kl"] == 0
        assert metrics["train/entropy"] == 0

    def test_episodes_are_played_within_the_mask(self, where: Where, mode: AutoresetMode) -> None:
        for greedy in (True, False):
            env = masked(where, mode)
            episodes = play(policy_for(env), env, 6, seed=0, greedy=greedy, record=True)
            assert len(taken(env)) >= episodes.lengths.sum() > 6
            assert all(action == only for action, only in taken(env))
            observations = episodes.trajectories[0].observations
            assert where == "info" or observations.keys() == {"x", "action_mask"}

    def test_nothing_allowed_is_refused_by_environment(self, where: Where, mode: AutoresetMode) -> None:
        env = masked(where, mode, blocked=1)
        with pytest.raises(ConfigurationError, match="environment 1 masks all 3 choices"):
            Collector(env, horizon=16).collect(policy_for(env))

    def test_masks_of_worker_processes_are_the_same(self, where: Where, mode: AutoresetMode) -> None:
        serial = masked(where, mode)
        policy = policy_for(serial)
        rows = [partial(Masked, where, row) for row in range(3)]
        workers = SharedMemoryVectorEnv(rows, num_workers=2, autoreset_mode=mode, context="fork")
        try:
            found, expected = (Collector(env, horizon=16).collect(policy) for env in (workers, serial))
        finally:
            workers.close()
        for name in ("observations", "actions", "valid", "values", "next_values"):
            assert equal(getattr(found, name), getattr(expected, name)), name


class LateMask(Masked):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, _ = super().reset(seed=seed)
        return observation, {}


class ForgottenMask(Masked):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


def test_a_mask_that_comes_late_is_refused() -> None:
    stepper = Stepper(SyncVectorEnv([lambda: LateMask("info")]))
    stepper.reset(0)
    with pytest.raises(ConfigurationError, match="none with the reset"):
        stepper.step(np.array([1]))


def test_without_a_mask_anything_is_allowed() -> None:
    stepper = Stepper(SyncVectorEnv([lambda: ForgottenMask("info")]))
    stepper.reset(0)
    assert stepper.observations.action_mask.sum() == 1
    stepper.step(np.array([1]))
    assert stepper.observations.action_mask.sum() == 3


def test_a_mask_for_box_actions_is_refused() -> None:
    env = masked("observation", AutoresetMode.SAME_STEP)
    env.single_action_space = spaces.Box(-1.0, 1.0, (2,))
    with pytest.raises(ConfigurationError, match="no discrete part"):
        Stepper(env).reset(0)
