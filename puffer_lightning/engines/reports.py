"""The metrics of an iteration, where Lightning's callbacks and loggers look for them."""

import lightning as L
import torch

from puffer_lightning.ppo import Metrics

# Of CSVLogger, that is 0.1 ms, and no crash takes more of its lines with it.
_SAVE_EVERY = 25


def report(trainer: L.Trainer, metrics: Metrics, env_steps: int) -> None:
    """Hand an iteration's metrics to callbacks and loggers.

    Not by ``self.log``, which would cast the step to float32 and costs a millisecond for every two metrics.

    Args:
        trainer: Training.
        metrics: By their logged names.
        env_steps: Environment steps so far, the x-axis.
    """
    trainer.callback_metrics.update(
        {name: torch.tensor(value, dtype=torch.float32) for name, value in metrics.items()}
    )
    iteration = trainer.current_epoch + 1
    if iteration % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=env_steps)
    if iteration % _SAVE_EVERY == 0:
        # CSVLogger writes where the step, and not the number of its lines, ends with 99: hardly ever for us.
        # It would keep all lines in memory until the next validation.
        for logger in trainer.loggers:
            logger.save()
