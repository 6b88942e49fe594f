"""``Checkpoint``: the best policy so far and the state to resume from."""

from copy import copy
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from puffer_lightning.callbacks.checkpoint_io import WholeFileIO, defect
from puffer_lightning.callbacks.protocols import ppo_parts
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.ppo import NonFiniteError

_OF_THE_BEST = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
)

# Of training, give or take an iteration, are what a process that is killed loses.
_SECONDS = 30.0


class Checkpoint(ModelCheckpoint):
    """Keeps ``best.ckpt``, by mean episode return, and ``last.ckpt``, to resume from.

    Lightning's ``ModelCheckpoint`` with what a reinforcement-learning run needs: a metric that is not there
    yet, since no episode has ended, is waited for; ``last.ckpt`` is also written when training ends or is
    interrupted, and an interruption leaves ``best.ckpt`` alone; a resumed run remembers the best so far
    wherever it writes; and a file is there whole or not at all, with a checksum. One that cannot be written,
    because the disk is full for one, is warned of on all ranks alike, and training goes on.

    An iteration that skipped minibatches, because their loss or gradients were not finite, and an end for
    that reason write nothing, so that ``last.ckpt`` is of before.

    With several ranks an exception writes nothing: saving takes all ranks, and one that failed would be
    waited for. The last regular ``last.ckpt`` is what remains. Signals are what ``StopOnSignal`` is for.

    Args:
        dirpath: Folder of the two files; by default ``checkpoints`` in the logger's.
        monitor: Metric that says which is best. One of validation, ``val/…``, is looked at after each
            validation, any other whenever ``last.ckpt`` is written.
        mode: Whether more (``max``) or less (``min``) of it is better.
        every_n_iterations: How often ``last.ckpt`` is written; by default after every 30 seconds of training.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        monitor: str = "rollout/episode_return",
        mode: Literal["min", "max"] = "max",
        every_n_iterations: int | None = None,
    ) -> None:
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ConfigurationError(f"every_n_iterations is {every_n_iterations}: set it to 1 or more.")
        if mode not in ("min", "max"):
            raise ConfigurationError(f"mode is {mode}: set it to max or min.")
        super().__init__(
            dirpath=dirpath,
            filename="best",
            monitor=monitor,
            mode=mode,
            save_last=True,
            every_n_epochs=every_n_iterations or 1,
        )
        self._state_key = self._generate_state_key(monitor=monitor, mode=mode)
        self._monitored = monitor
        self._every_n_iterations = every_n_iterations
        self._seconds = 0.0
        self._training = False
        self._validated = False
        self._last_is_current = False
        self._saved = False

    @property
    @override
    def state_key(self) -> str:
        """By what is best alone: a resumed run may look at it more or less often."""
        return self._state_key

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileIO()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._training = not getattr(trainer, "fast_dev_run", False)
        self._validated = self._last_is_current = False
        # The trainer looks for new ones each time it is asked for them.
        self._metrics = trainer.callback_metrics
        if self._every_n_iterations is None:
            self._module, _ = ppo_parts(trainer, self)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The iteration is not over: a run resumed from here would do it twice. Saved when it is.
        self._validated = trainer.state.fn == TrainerFn.FITTING

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._training:
            return
        if self._metrics.get("train/skipped", 0):
            # A policy whose updates are not finite may have gone wrong before: what it was is worth keeping.
            self._last_is_current = self._validated = False
            return
        due = self._is_due(trainer)
        self._last_is_current = False
        measured = self._validated if self._monitored.startswith("val/") else due
        self._validated = False
        if measured:
            self._save_if_best(trainer)
        if due:
            self._save_last(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        if self._every_n_iterations is not None:
            return (trainer.current_epoch + 1) % self._every_n_iterations == 0
        # As gathered from all ranks, so that they agree.
        self._seconds += max(map(sum, self._module.learner.rank_seconds))
        due = self._seconds >= _SECONDS
        if due:
            self._seconds = 0.0
        return due

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._training:
            return
        self._training = False
        if not self._last_is_current:
            if not self._monitored.startswith("val/"):
                self._save_if_best(trainer)
            self._save_last(trainer)
        if not self.best_model_path:
            rank_zero_info(
                f"No best.ckpt was written, as {self._monitored} was never measured: if that is not for want "
                "of finished episodes, set monitor to another metric."
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._training or trainer.world_size > 1:
            return
        self._training = False
        if isinstance(exception, NonFiniteError):
            return
        if self._save_last(trainer):
            rank_zero_info(f"Interrupted; to go on from here, resume with ckpt_path {self.last_model_path}")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning forgets the best so far where the folder differs: with each version of a logger it does.
        if state_dict["best_model_path"] and Path(state_dict["best_model_path"]).exists():
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
        else:
            self.last_model_path = state_dict["last_model_path"]

    def _save_if_best(self, trainer: Trainer) -> None:
        metrics = self._monitor_candidates(trainer)
        if self._monitored in metrics:
            before = {name: copy(getattr(self, name)) for name in _OF_THE_BEST}
            self._saved = True
            self._save_monitor_checkpoint(trainer, metrics)
            if not self._saved:
                vars(self).update(before)

    def _save_last(self, trainer: Trainer) -> bool:
        before = self.last_model_path
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self._last_is_current = self._saved
        if not self._saved:
            self.last_model_path = before
        return self._saved

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        failure = None
        try:
            super()._save_checkpoint(trainer, filepath)
        except OSError as problem:
            failure = str(problem)
            # Where the ranks that had nothing to write are.
            trainer.strategy.barrier("Trainer.save_checkpoint")
        failure = trainer.strategy.broadcast(failure)
        self._saved = failure is None
        if failure:
            module, _ = ppo_parts(trainer, self)
            rank_zero_warn(
                f"{filepath} could not be written after {module.env_steps:,} environment steps ({failure}): "
                "training goes on, and the checkpoint before it remains."
            )


def newest_last(trainer: Trainer) -> Path | None:
    """The newest whole checkpoint of all runs that keep theirs where this one will, or None.

    Those of earlier versions, where the logger numbers its runs: a run that is started again has a new one.
    A checkpoint that is truncated or changed is named in a warning and passed over.

    Args:
        trainer: With a ``Checkpoint`` among its callbacks.

    Raises:
        ConfigurationError: They are not kept in a local folder.
    """
    given = [callback.dirpath for callback in trainer.callbacks if isinstance(callback, Checkpoint)]  # type: ignore[attr-defined]
    if given and given[0]:
        if "://" in str(given[0]):
            raise ConfigurationError(
                f"ckpt_path last does not look in {given[0]}: give the checkpoint's path."
            )
        folders = [Path(given[0])]
    elif trainer.loggers:
        logger = trainer.loggers[0]
        runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
        folders = list(runs.glob("*/checkpoints"))
    else:
        folders = [Path(trainer.default_root_dir) / "checkpoints"]
    found = [path for folder in folders for name in ("last*.ckpt", "best.ckpt") for path in folder.glob(name)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if not (wrong := defect(path)):
            return path
        rank_zero_warn(f"Passing over {path}, which is not whole: {wrong}.")
    return None
