"""All callbacks together on two ranks: none waits for one that does not come, and each thing happens once."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch

from puffer_lightning.callbacks import Checkpoint, EpisodeWriter, EvaluationReport, Progress, Video
from tests.callbacks.runs import PPO, data, trainer
from tests.distributed.processes import run_ranks


def fit_and_predict(rank: int, folder: Path) -> str:
    callbacks = (
        Progress(),
        EvaluationReport(),
        Checkpoint(str(folder / "checkpoints"), every_n_iterations=2),
        Video(str(folder / "films")),
        EpisodeWriter(str(folder / "episodes.npz")),
    )
    shown = io.StringIO()
    run = trainer(*callbacks, folder=folder, validate_every=2, devices=2, strategy="ddp")
    source = data(8, env="FrozenLake-v1", eval_episodes=5)
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        run.fit(model := PPO(), datamodule=source)
        run.predict(model, datamodule=source, return_predictions=False)
    return shown.getvalue()


def test_each_thing_happens_once(tmp_path: Path) -> None:
    first, second = run_ranks(fit_and_predict, tmp_path)
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
