"""What is kept of a run that numbers which are not finite have ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L

from puffer_lightning import files
from puffer_lightning.ppo import NonFiniteError


@contextmanager
def keeping_bad_batch(trainer: L.Trainer) -> Iterator[None]:
    """Where a ``NonFiniteError`` is raised, write its batch and add to it what to look at and go on from.

    ``bad_batch.pt`` is written beside the checkpoints, or where the metrics are if there are none.

    Args:
        trainer: Of all ranks, since the error is raised on all of them.
    """
    try:
        yield
    except NonFiniteError as error:
        keeper = trainer.checkpoint_callback
        # All ranks have to ask for the folder of the logs.
        folders = getattr(keeper, "dirpath", None), trainer.log_dir, trainer.default_root_dir
        folder = next(Path(folder) for folder in folders if folder and "://" not in str(folder))
        if error.batch is not None:
            files.write(folder / "bad_batch.pt", error.batch)
        saved = [path for name in ("last", "best") if (path := getattr(keeper, f"{name}_model_path", ""))]
        good = f"; the last good checkpoint is {saved[0]}" if saved else ""
        raise NonFiniteError(f"{error}; the rollout is in {folder / 'bad_batch.pt'}{good}.") from None
