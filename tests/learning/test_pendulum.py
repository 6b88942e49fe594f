"""Continuous control, with episodes that are only ever truncated."""

import pytest
import torch
from lightning.fabric import Fabric
from torch.optim import Adam

from puffer_lightning.engines import PPO, RolloutDataModule, iterations

SWINGS_UP_AT = -400.0
"""Random actions get about -1200, the best known policies -150."""


@pytest.mark.slow
def test_ppo_swings_the_pendulum_up() -> None:
    torch.manual_seed(1)
    data = RolloutDataModule("Pendulum-v1", num_envs=16, horizon=128, total_timesteps=80_000)
    model = PPO(
        optimizer=lambda params: Adam(params, lr=1e-3, eps=1e-5, fused=True),
        gamma=0.9,
        update_epochs=8,
        num_minibatches=16,
        ent_coef=0.0,
    )
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    returns = data.evaluate(model.policy).returns
    data.close()

    assert len(returns) == 100
    assert returns.mean() >= SWINGS_UP_AT
