"""Nested observations, hybrid actions and action masks, learned from."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lightning.fabric import Fabric
from torch.optim import Adam

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.policies import MultiInputPolicy


class Matching(gym.Env[Any, Any]):
    """Three actions at once, each to match its part of the observation; one step, and 1 for each match."""

    observation_space = spaces.Dict(
        camera=spaces.Box(0, 255, (8, 8), np.uint8),
        rest=spaces.Tuple([spaces.Box(-1.0, 1.0, (1,)), spaces.MultiBinary(2)]),
    )
    action_space = spaces.Dict(
        side=spaces.Discrete(2, start=1),
        hand=spaces.Tuple([spaces.Box(-1.0, 1.0, (1,)), spaces.MultiBinary(2)]),
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        self.place = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        self.keys = self.np_random.integers(2, size=2, dtype=np.int8)
        camera = np.zeros((8, 8), np.uint8)
        camera[:, 4 * self.side : 4 * self.side + 4] = 200
        return {"camera": camera, "rest": (self.place, self.keys)}, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        place, keys = action["hand"]
        matches = (
            action["side"] == 1 + self.side,
            max(0.0, 1.0 - float(abs(place - self.place)[0])),
            (keys == self.keys).mean(),
        )
        return self.reset()[0], float(sum(matches)), True, False, {}


def matching(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Matching] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.slow
def test_every_part_of_a_hybrid_action_learns_from_its_part_of_the_observation() -> None:
    torch.manual_seed(1)
    data = RolloutDataModule(matching, num_envs=32, horizon=16, total_timesteps=30_000)
    model = PPO(
        lambda *both: MultiInputPolicy(*both, image_size=32, hidden_size=64),
        optimizer=lambda params: Adam(params, lr=2.5e-3, eps=1e-5, fused=True),
        gamma=0.5,
        ent_coef=0.0,
        normalize_observations=True,
        normalize_rewards=True,
    )
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    returns = data.evaluate(model.policy).returns
    data.close()
    # At chance the parts score 0.5 or less; without any one of them the rest could not reach this.
    assert returns.mean() >= 2.7


@pytest.mark.slow
def test_taxi_is_solved_with_the_mask_of_its_infos() -> None:
    torch.manual_seed(1)
    data = RolloutDataModule("Taxi-v4", num_envs=16, horizon=128, total_timesteps=120_000, eval_greedy=False)
    model = PPO(normalize_rewards=True)
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    returns = data.evaluate(model.policy).returns
    data.close()
    assert returns.mean() >= 6.0
