"""MuJoCo through gymnasium, against gymnasium stepped by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from puffer_lightning.distributed import derive_seed
from puffer_lightning.envs import make_vector_env
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import Collector

pytest.importorskip("mujoco")


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5"])
def test_rollouts_hold_what_gymnasium_returns(env_id: str) -> None:
    env = make_vector_env(env_id, 2)
    torch.manual_seed(0)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    rollout = Collector(env, 80, seed=3).collect(policy)
    assert rollout.observations.dtype == torch.float64

    by_hand = gym.make(env_id)
    observation, _ = by_hand.reset(seed=derive_seed(3, "environments") + 1)
    for t in range(80):
        assert np.array_equal(rollout.observations[t, 1], observation)
        action = rollout.actions[t, 1].clamp(-1, 1).numpy()
        observation, reward, terminated, truncated, _ = by_hand.step(action)
        assert rollout.rewards[t, 1] == np.float32(reward)
        assert rollout.terminated[t, 1] == terminated
        if terminated or truncated:
            observation, _ = by_hand.reset()
    assert rollout.terminated.any() == (env_id == "Hopper-v5")
