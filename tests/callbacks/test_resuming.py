"""What a checkpoint says of the options of its run, and what a resumed run says of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from puffer_lightning.callbacks import RunOptions
from puffer_lightning.engines import PPO
from tests.callbacks.runs import data, trainer

OPTIONS: dict[str, Any] = {
    "model": {"gamma": 0.99, "policy": None},
    "data": {"env": "CartPole-v1"},
    "trainer": {"logger": {"init_args": {"name": "mine"}}},
    "ckpt_path": "here",
}


def saved(folder: Path, options: dict[str, Any] = OPTIONS, ckpt_path: Path | None = None) -> str:
    run = trainer(RunOptions(options), folder=folder)
    run.fit(PPO(), datamodule=data(2 if ckpt_path else 1), ckpt_path=ckpt_path)
    run.save_checkpoint(folder / "run.ckpt")
    text: str = torch.load(folder / "run.ckpt", weights_only=True)["options"]
    return text


def test_options_are_text_without_those_of_loggers(tmp_path: Path) -> None:
    text = saved(tmp_path)
    assert json.loads(text) == {"model.gamma": "0.99", "model.policy": "null", "data.env": '"CartPole-v1"'}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"gamma": 0.9}, "model.gamma: 0.99 → 0.9, model.policy: null → not given"),
        ({"gamma": 0.99, "policy": None, "compile": True}, "model.compile: not given → true"),
        ({"gamma": 0.99, "policy": None}, None),
    ],
)
def test_what_changed_is_said(
    model: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    with caplog.at_level("INFO"):
        saved(tmp_path, {**OPTIONS, "model": model, "ckpt_path": "there"}, tmp_path / "run.ckpt")
    lines = [record.message for record in caplog.records if "not those of the checkpoint" in record.message]
    assert lines == ([] if said is None else [f"Options that are not those of the checkpoint: {said}"])
