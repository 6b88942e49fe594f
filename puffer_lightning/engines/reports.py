"""The metrics of an iteration, where Lightning's callbacks and loggers look for them."""

import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from puffer_lightning.ppo import Metrics

# Of CSVLogger, that is 0.1 ms, and no crash takes more of its lines with it.
_SAVE_EVERY = 25


def report(
    trainer: L.Trainer, callback_metrics: dict[str, torch.Tensor], metrics: Metrics, env_steps: int
) -> None:
    """Hand an iteration's metrics to callbacks and loggers.

    Not by ``self.log``, which would cast the step to float32 and costs a millisecond for every two metrics.

    Args:
        trainer: Training.
        callback_metrics: The trainer's; it looks for others each time it is asked for them.
        metrics: By their logged names.
        env_steps: Environment steps so far, the x-axis.
    """
    values = torch.tensor([*metrics.values()], dtype=torch.float32)
    callback_metrics.update(zip(metrics, values.unbind(), strict=True))
    iteration = trainer.current_epoch + 1
    if iteration % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=env_steps)
    if iteration % _SAVE_EVERY == 0:
        # CSVLogger writes where the step, and not the number of its lines, ends with 99: hardly ever for us.
        # It would keep all lines in memory until the next validation.
        for logger in trainer.loggers:
            logger.save()


def outlast_full_disks(logger: CSVLogger) -> None:
    """Let a logger keep its lines until there is room on the disk, instead of ending the run.

    What a failed attempt has left in its file is taken out again.

    Args:
        logger: It says so once.
    """
    if "save" in vars(logger):
        # An earlier run has told it already.
        return
    save, said = logger.save, False

    def save_or_keep() -> None:
        nonlocal said
        writer = logger.experiment
        path, columns = Path(writer.metrics_file_path), list(writer.metrics_keys)
        size = path.stat().st_size if path.exists() else 0
        # For a new column Lightning writes all lines anew.
        lines = path.read_bytes() if size and not set().union(*writer.metrics) <= set(columns) else None
        try:
            save()
        except OSError as problem:
            writer.metrics_keys = columns
            if lines is not None:
                path.write_bytes(lines)
            elif size:
                os.truncate(path, size)
            else:
                path.unlink(missing_ok=True)
            if not said:
                said = True
                rank_zero_warn(f"{path} cannot be written ({problem}): its lines are kept until it can.")

    logger.save = save_or_keep  # type: ignore[method-assign]
