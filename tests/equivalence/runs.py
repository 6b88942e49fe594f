"""Short training runs, by the Trainer and by Fabric, of which only the engine differs."""

from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.ppo import Metrics

STEPS_PER_ITERATION = 8 * 16


def make_run(env: str, num_iterations: int, ranks: int = 1, **options: Any) -> tuple[PPO, RolloutDataModule]:
    data = RolloutDataModule(
        env, num_envs=8, horizon=16, total_timesteps=num_iterations * STEPS_PER_ITERATION * ranks
    )
    return PPO(**({"update_epochs": 2, "num_minibatches": 2} | options)), data


def by_trainer(
    env: str = "CartPole-v1", num_iterations: int = 3, seed: int = 1, **options: Any
) -> tuple[dict[str, Tensor], Metrics]:
    """The policy's weights and the last metrics of a run."""
    L.seed_everything(seed, verbose=False)
    model, data = make_run(env, num_iterations, **options)
    trainer = quiet_trainer()
    trainer.fit(model, datamodule=data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model.policy.state_dict(), metrics


def by_fabric(
    env: str = "CartPole-v1", num_iterations: int = 3, seed: int = 1, **options: Any
) -> tuple[dict[str, Tensor], Metrics]:
    """The same of a run by Fabric."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(seed, verbose=False)
    model, data = make_run(env, num_iterations, **options)
    *_, metrics = iterations(fabric, model, data)
    data.close()
    return model.policy.state_dict(), metrics


def quiet_trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=10**6,
        **options,
    )


def without_time(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "ranks/"))}


def assert_equal_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weights in one.items():
        assert torch.equal(weights, other[name]), name


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(weights, other[name]) for name, weights in one.items())
