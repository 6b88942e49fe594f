"""An environment in the style of PufferLib, behind the adapter."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs import make_vector_env
from puffer_lightning.envs.buffered import BufferedVectorEnv, make_buffered_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import Collector, play

PATH = "tests.envs.test_buffered.Matching"


class Matching:
    """Say the bit you see; right pays 1. Odd agents are truncated after 3 steps, the others end after 4."""

    single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(
        self, num_envs: int = 1, agents: int = 1, flags: Any = np.uint8, truncates: bool = True
    ) -> None:
        self.num_agents = num_envs * agents
        self.observations = np.zeros((self.num_agents, 2), np.float32)
        self.rewards = np.zeros(self.num_agents, np.float32)
        self.terminals = np.zeros(self.num_agents, flags)
        self.truncations = np.zeros(self.num_agents, flags)
        self.actions = np.zeros(self.num_agents, np.int32)
        self.lengths = np.where(np.arange(self.num_agents) % 2 & truncates, 3, 4)
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self.elapsed = np.zeros(self.num_agents, np.int64)
        self.observe()
        return self.observations, []

    def observe(self) -> None:
        self.observations[:, 0] = 2 * self.rng.integers(2, size=self.num_agents) - 1
        self.observations[:, 1] = self.elapsed / 4

    def step(self, actions: Any) -> Any:
        self.actions[:] = actions
        self.rewards[:] = (self.observations[:, 0] > 0) == self.actions
        self.elapsed += 1
        ended = self.elapsed == self.lengths
        self.terminals[:] = ended & (self.lengths == 4)
        self.truncations[:] = ended & (self.lengths == 3)
        self.elapsed[ended] = 0
        self.observe()
        infos = [{"ended": int(ended.sum())}] if ended.any() else []
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("flags", [np.uint8, np.bool_])
def test_nothing_is_copied(flags: Any) -> None:
    inner = Matching(3, flags=flags)
    env = BufferedVectorEnv(inner)
    observations, infos = env.reset(seed=0)
    assert observations is inner.observations
    assert infos == {}
    for step in range(4):
        observations, rewards, terminated, truncated, infos = env.step(np.ones(3, np.int64))
        assert observations is inner.observations
        assert rewards is inner.rewards
        assert np.shares_memory(terminated, inner.terminals)
        assert np.shares_memory(truncated, inner.truncations)
        assert terminated.dtype == truncated.dtype == np.bool_
        assert truncated.tolist() == [False, step == 2, False]
        assert terminated.tolist() == [step == 3, False, step == 3]
        assert infos == {2: {"infos": [{"ended": 1}]}, 3: {"infos": [{"ended": 2}]}}.get(step, {})


def test_it_is_a_vector_environment_of_its_agents() -> None:
    env = make_vector_env(make_buffered_env, 6, {"env": PATH, "agents_per_env": 2, "agents": 2})
    assert isinstance(env, BufferedVectorEnv)
    assert env.num_envs == 6
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.observation_space.shape == (6, 2)
    assert isinstance(env, gym.vector.VectorEnv)
    env.close()
    assert env.env.closed  # type: ignore[attr-defined]


def test_a_seed_is_passed_on() -> None:
    first, again, other = (BufferedVectorEnv(Matching(16)).reset(seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rollouts_hold_what_each_step_saw_and_not_what_the_buffers_hold_later() -> None:
    env = BufferedVectorEnv(Matching(4))
    torch.manual_seed(0)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    collector = Collector(env, 9, seed=3)
    with pytest.warns(UserWarning, match="final_obs"):
        rollout = collector.collect(policy)
    cut = rollout.truncated & ~rollout.terminated
    assert cut.sum() == 2 * 3
    assert torch.equal(rollout.next_values[cut], rollout.values[cut])
    goes_on = ~(rollout.truncated | rollout.terminated)[:-1]
    assert torch.equal(rollout.next_values[:-1][goes_on], rollout.values[1:][goes_on])
    assert rollout.observations[:, 0, 1].tolist() == [0, 0.25, 0.5, 0.75] * 2 + [0]
    right = (rollout.observations[..., 0] > 0) == (rollout.actions == 1)
    assert torch.equal(rollout.rewards, right.float())
    assert sorted(rollout.episode_lengths.tolist()) == [3] * 6 + [4] * 4


def test_it_is_played_to_the_end() -> None:
    env = BufferedVectorEnv(Matching(2))
    policy = make_policy(env.single_observation_space, env.single_action_space)
    episodes = play(policy, env, 4, seed=0, record=True)
    assert episodes.lengths.tolist() == [4, 3, 4, 3]
    for trajectory in episodes.trajectories:
        right = (trajectory.observations[:, 0] > 0) == trajectory.actions
        np.testing.assert_array_equal(trajectory.rewards, right)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"env": "tests.envs.test_buffered.Missing"}, "cannot be imported"),
        ({"env": PATH, "agents_per_env": 4}, "agents_per_env 4 does not divide num_envs 6"),
        ({"env": PATH, "agents_per_env": 2}, "made 3 agents where num_envs 6"),
        ({"env": PATH, "flags": np.float32}, "float32: make its terminals and truncations bool"),
        ({"env": lambda num_envs: Unbuffered(num_envs)}, "let its rewards be a NumPy array"),
    ],
)
def test_what_cannot_work_is_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_buffered_env(6, **kwargs)


class Unbuffered(Matching):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.rewards = [0.0] * num_envs  # type: ignore[assignment]
