"""From which checkpoint the command line resumes, and with which other options."""

import json
import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from puffer_lightning.callbacks.checkpoint import newest_last
from puffer_lightning.distributed import check_same_options, flatten_options
from puffer_lightning.errors import ConfigurationError

_ENTRY = "options"
# Loggers have folders of their own in each run.
_LEFT_OUT = re.compile(r"config|ckpt_path|trainer\.logger")


class RunOptions(Callback):
    """Knows the options of the run.

    Ranks whose options differ are refused, before any of them waits for another. A checkpoint holds the
    options as text (JSON by dotted names, without those of loggers), and a run that is resumed with others
    says which. They are only compared: what is given now counts.

    Args:
        options: By name, nested at will.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_same_options(self._options)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_ENTRY] = json.dumps(self._kept())

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn is not TrainerFn.FITTING or _ENTRY not in checkpoint:
            return
        here, there = self._kept(), json.loads(checkpoint[_ENTRY])
        changed = [
            f"{name}: {there.get(name, 'not given')} → {here.get(name, 'not given')}"
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]
        if changed:
            rank_zero_info(f"Options that are not those of the checkpoint: {', '.join(changed)}")

    def _kept(self) -> dict[str, str]:
        return {name: value for name, value in flatten_options(self._options) if not _LEFT_OUT.match(name)}


def find_checkpoint(trainer: Trainer, ckpt_path: str | Path | None, or_anew: bool) -> str | Path | None:
    """The checkpoint that ``--ckpt_path`` stands for: ``last`` and ``auto`` are the newest, a path is itself.

    Args:
        trainer: With a ``Checkpoint`` among its callbacks.
        ckpt_path: As given.
        or_anew: With ``auto`` there need not be one.

    Raises:
        ConfigurationError: There is none.
    """
    if ckpt_path not in ("last", "auto"):
        return ckpt_path
    newest = newest_last(trainer)
    if newest is None and (ckpt_path == "last" or not or_anew):
        instead = ", or set it to auto to start anew" if or_anew else ""
        raise ConfigurationError(
            f"ckpt_path is {ckpt_path}, but there is none: give the path of a checkpoint{instead}."
        )
    rank_zero_info(f"Going on from {newest}" if newest else "Starting anew")
    return newest
