"""What the environments in torch are for: each can be learnt, and the maze only by who remembers."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from puffer_lightning.engines import PPO, RolloutDataModule, iterations


def mean_return(
    env: str, env_kwargs: dict[str, Any], total_timesteps: int, eval_episodes: int, **coefficients: Any
) -> float:
    torch.manual_seed(0)
    data = RolloutDataModule(
        env, env_kwargs, num_envs=64, horizon=32, total_timesteps=total_timesteps, eval_episodes=eval_episodes
    )
    model = PPO(**coefficients)
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    returns = data.evaluate(model.policy).returns
    data.close()
    return float(returns.mean())


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_policy_that_sees_the_sign_all_the_way_solves_the_maze(mode: str) -> None:
    env_kwargs = {"remind": True, "autoreset_mode": mode}
    assert mean_return("puffer/TorchMemoryMaze-v0", env_kwargs, 80_000, 100) > 0.95


def test_a_feed_forward_policy_stays_at_chance_in_the_maze() -> None:
    assert mean_return("puffer/TorchMemoryMaze-v0", {}, 80_000, 1000) == pytest.approx(0.5, abs=0.06)


def test_cart_pole_is_learnt() -> None:
    assert mean_return("puffer/TorchCartPole-v0", {}, 120_000, 64, gamma=0.98, gae_lambda=0.8) > 150
