"""Small runs that the tests of the callbacks share."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint

from puffer_lightning.engines import PPO, RolloutDataModule

STEPS_PER_ITERATION = 4 * 32


def data(iterations: int = 3, env: Any = "CartPole-v1", **options: Any) -> RolloutDataModule:
    options = {"num_envs": 4, "horizon": 32, "eval_episodes": 2} | options
    return RolloutDataModule(env, total_timesteps=iterations * STEPS_PER_ITERATION, **options)


def trainer(
    *callbacks: Callback, folder: Path, validate_every: int | None = None, **options: Any
) -> pl.Trainer:
    """A trainer that does, shows and writes nothing unasked."""
    pl.seed_everything(1, verbose=False)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1.0 if validate_every else 0,
        "check_val_every_n_epoch": validate_every or 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


@contextlib.contextmanager
def heard() -> Iterator[io.StringIO]:
    """What Lightning logs."""
    handler = logging.StreamHandler(said := io.StringIO())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


class Break(Callback):
    """Raises an exception in the middle of an iteration (from 0)."""

    def __init__(self, iteration: int, exception: BaseException, hook: str = "on_train_batch_end") -> None:
        self.iteration = iteration
        self.exception = exception
        setattr(self, hook, self._raise)

    def _raise(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.iteration:
            raise self.exception


class Other(pl.LightningModule):
    """A module that is not PPO."""

    def training_step(self, *_: Any) -> None:
        raise AssertionError

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> None:
        raise AssertionError


__all__ = ["PPO", "STEPS_PER_ITERATION", "Break", "Other", "data", "heard", "trainer"]
