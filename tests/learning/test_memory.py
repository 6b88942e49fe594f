"""The memory maze, where whoever forgets stays at chance, 0.5, is solved by both policies with memory."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.policies import LSTMPolicy, TransformerPolicy

POLICIES = [
    pytest.param(LSTMPolicy, 100_000, id="lstm"),
    pytest.param(
        partial(TransformerPolicy, context=16, num_blocks=1, num_heads=2, hidden_size=32),
        80_000,
        id="transformer",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "total_timesteps"), POLICIES)
def test_a_policy_with_memory_solves_the_maze(policy: Any, total_timesteps: int) -> None:
    torch.manual_seed(0)
    data = RolloutDataModule("puffer/TorchMemoryMaze-v0", total_timesteps=total_timesteps, eval_episodes=200)
    model = PPO(policy)
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    mean_return = data.evaluate(model.policy).returns.mean()
    data.close()
    assert mean_return > 0.95
