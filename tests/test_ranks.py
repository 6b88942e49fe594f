"""The command line on two ranks, as a user starts it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.commandline import QUICK, STEPS_PER_ITERATION, column, refused, run

ROOT = Path(__file__).parents[1]
TWO = [*QUICK, "--trainer.devices=2", "--data.env=tests.faulty.Faulty"]
PER_ITERATION = 2 * STEPS_PER_ITERATION


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def fault(kind: str, rank: int, step: int, once: bool = False) -> list[str]:
    options = {"fault": kind, "rank": rank, "step": step, **({"once": "failed"} if once else {})}
    return [f"--data.env_kwargs.{name}={value}" for name, value in options.items()]


def assert_none_left(processes: int) -> None:
    pids = [int(path.name) for path in Path("pids").iterdir()]
    assert len(pids) == processes
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_the_cause_is_said_once_and_nobody_is_left() -> None:
    done = start("puffer_lightning", "fit", *TWO, *fault("raise", rank=1, step=20))
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the pole broke") == done.stderr.count("Traceback") == 1
    assert "Rank 1 failed." in done.stderr
    assert done.stderr.count("GPU available") == 1, "said by the launcher, and not again by rank 0"
    assert list(column("train/entropy")) == [PER_ITERATION], "the iteration before it failed"
    assert_none_left(2)


@pytest.mark.slow
def test_torchrun_starts_again_where_the_last_checkpoint_was_written() -> None:
    total = [f"--data.total_timesteps={6 * PER_ITERATION}", "--checkpoint.every_n_iterations=2"]
    done = start(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        *("-m", "puffer_lightning", "fit", *TWO, *total, "--ckpt_path=auto"),
        *fault("kill", rank=1, step=3 * 16 + 5, once=True),
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(Starting anew|Going on from .*/version_0/checkpoints/last\.ckpt)", done.stderr) == [
        "Starting anew",
        "Going on from lightning_logs/version_0/checkpoints/last.ckpt",
    ]
    # Three iterations were done when a rank was killed, and two saved.
    assert list(column("train/entropy"))[:2] == [PER_ITERATION, 2 * PER_ITERATION]
    assert list(column("train/entropy", version=1)) == [n * PER_ITERATION for n in (3, 4, 5, 6)]
    assert_none_left(4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_a_run_that_is_told_to_end_saves_on_all_ranks(launcher: str) -> None:
    options = ["--data.total_timesteps=100_000_000", "--checkpoint.dirpath=ck", "--trainer.logger=false"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = [*(torchrun if launcher == "torchrun" else []), "puffer_lightning", "fit", *TWO, *options]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *command, *fault("none", rank=0, step=0)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not Path("ck/last.ckpt").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        said = process.communicate(timeout=120)[1]
    # torchrun's agent ends with the traceback of its own signal handler.
    assert process.returncode == {"ours": 143, "torchrun": 1}[launcher]
    steps = torch.load("ck/last.ckpt", weights_only=True)["ppo"]["env_steps"]
    assert steps % PER_ITERATION == 0
    assert said.count(f"Ended by SIGTERM after {steps:,} environment steps") == 1
    assert_none_left(2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--trainer.strategy DDPStrategy --trainer.strategy.process_group_backend nccl", "which needs GPUs"),
        ("--trainer.accelerator gpu", "No supported gpu backend found!"),
        ("--trainer.strategy DDPStrategy --trainer.strategy.timeout soon", "--trainer.strategy.timeout"),
        ("--model.num_minibatches 7", "num_minibatches 7 does not divide"),
    ],
)
def test_refuses_what_cannot_work_before_any_process_starts(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    assert message in refused(capsys, "fit", *QUICK, "--trainer.devices=2", *args.split())
    assert psutil.Process().children() == before


@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_there_must_be_a_last_checkpoint(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, subcommand, *QUICK, "--ckpt_path=last")
    assert "ckpt_path is last, but there is none: give the path of a checkpoint" in said
    assert ("auto to start anew" in said) == (subcommand == "fit")


def test_auto_starts_anew_but_evaluates_nothing_untrained(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert "ckpt_path is auto, but there is none" in refused(capsys, "test", *QUICK, "--ckpt_path=auto")
    with caplog.at_level("INFO"):
        run("fit", "--ckpt_path=auto")
        run(
            "fit",
            "--ckpt_path=auto",
            f"--data.total_timesteps={4 * STEPS_PER_ITERATION}",
            "--model.gamma=0.9",
        )
    assert "Starting anew" in caplog.text
    assert "Going on from lightning_logs/version_0/checkpoints/last.ckpt" in caplog.text
    assert "data.total_timesteps: 384 → 512, model.gamma: 0.99 → 0.9" in caplog.text
    assert list(column("train/entropy", version=1)) == [4 * STEPS_PER_ITERATION]
