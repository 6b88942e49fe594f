"""All callbacks together on two ranks: none waits for one that does not come, and each thing happens once."""

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from puffer_lightning.callbacks import Checkpoint, EpisodeWriter, EvaluationReport, Progress, Video
from puffer_lightning.distributed import rank as own_rank
from tests.callbacks.runs import PPO, data, trainer
from tests.distributed.processes import run_ranks


class Slow(Callback, CSVLogger):
    """Makes rank 0, and what rank 0 alone does, slower than the other by far."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.1 * (own_rank() == 0))

    on_train_epoch_end = on_validation_end = on_train_end = on_train_batch_start

    @rank_zero_only
    def log_metrics(self, *arguments: Any, **options: Any) -> None:
        time.sleep(0.1)
        super().log_metrics(*arguments, **options)


def fit_and_predict(rank: int, folder: Path, slow: bool) -> str:
    callbacks = (
        Progress(),
        EvaluationReport(),
        Checkpoint(str(folder / "checkpoints"), every_n_iterations=2),
        Video(str(folder / "films")),
        EpisodeWriter(str(folder / "episodes.npz")),
    )
    shown = io.StringIO()
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    if slow:
        options["logger"] = Slow(folder)
        callbacks = (*callbacks, options["logger"])
    run = trainer(*callbacks, folder=folder, validate_every=2, **options)
    source = data(8, env="FrozenLake-v1", eval_episodes=5)
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        run.fit(model := PPO(), datamodule=source)
        run.predict(model, datamodule=source, return_predictions=False)
    return shown.getvalue()


@pytest.mark.parametrize("slow", [False, True], ids=["ranks of one speed", "slow rank 0"])
def test_each_thing_happens_once(tmp_path: Path, slow: bool) -> None:
    first, second = run_ranks(fit_and_predict, tmp_path, slow)
    assert first.count("evaluation after 512 steps: 5 greedy episodes") == 1
    assert first.count("1,024 of 1,024 steps (100%)") == 1
    assert "evaluation" not in second
    assert "steps (" not in second
    assert len(list((tmp_path / "films").iterdir())) == 2
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert last["ppo"]["env_steps"] == 1024
    played = [len(np.load(tmp_path / f"episodes-rank{rank}.npz")["episode_lengths"]) for rank in range(2)]
    assert played == [3, 2]
    assert not (tmp_path / "episodes.npz").exists()
