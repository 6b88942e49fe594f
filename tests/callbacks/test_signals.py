"""Signals that come amid training, sent by the runs themselves."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer

from puffer_lightning.callbacks import Checkpoint, StopOnSignal
from puffer_lightning.distributed import rank as own_rank
from puffer_lightning.distributed import world_size
from tests.callbacks.runs import PPO, STEPS_PER_ITERATION, Other, data, heard, trainer
from tests.distributed.processes import run_ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Send(Callback):
    """Sends this process signals in a hook of an iteration (from 0), on one rank."""

    def __init__(
        self, iteration: int, *numbers: int, hook: str = "on_train_batch_start", rank: int = 0
    ) -> None:
        self.iteration, self.numbers, self.rank = iteration, numbers, rank
        setattr(self, hook, self._send)

    def _send(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.iteration and own_rank() == self.rank:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def fit(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> int:
    """The exit code."""
    checkpoint = Checkpoint(str(folder), every_n_iterations=100)
    run = trainer(*callbacks, StopOnSignal(), checkpoint, folder=folder, **options)
    try:
        run.fit(PPO(), datamodule=data(6 * world_size()), ckpt_path=ckpt_path)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def iterations(folder: Path, ranks: int = 1) -> int:
    last = torch.load(folder / "last.ckpt", weights_only=True)
    return int(last["ppo"]["env_steps"]) // (ranks * STEPS_PER_ITERATION)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_run_ends_after_the_iteration_and_can_be_resumed(number: int, tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with heard() as said:
        assert fit(tmp_path, Send(2, number)) == 128 + number
    assert iterations(tmp_path) == 3
    assert f"after 384 environment steps; to go on from here, resume with ckpt_path {tmp_path}/last.ckpt" in (
        said.getvalue()
    )
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert fit(tmp_path, ckpt_path=tmp_path / "last.ckpt") == 0
    assert iterations(tmp_path) == 6


def test_a_signal_after_the_update_counts_one_iteration_later(tmp_path: Path) -> None:
    assert fit(tmp_path, Send(2, signal.SIGTERM, hook="on_train_batch_end")) == 143
    assert iterations(tmp_path) == 4


def test_after_the_last_iteration_too(tmp_path: Path) -> None:
    assert fit(tmp_path, Send(5, signal.SIGTERM, hook="on_train_batch_end")) == 143
    assert iterations(tmp_path) == 6


def test_not_even_the_least_number_of_iterations_is_waited_for(tmp_path: Path) -> None:
    assert fit(tmp_path, Send(2, signal.SIGTERM), min_epochs=5, min_steps=10**6) == 143
    assert iterations(tmp_path) == 3


def test_signals_other_than_control_c_may_come_again(tmp_path: Path) -> None:
    assert fit(tmp_path, Send(2, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)) == 143
    assert iterations(tmp_path) == 3


def test_control_c_twice_ends_at_once(tmp_path: Path) -> None:
    twice = "fit(Path(sys.argv[1]), Send(2, signal.SIGINT, signal.SIGINT))"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            f"import sys; from {__name__} import *; {twice}",
            str(tmp_path),
        ],
        env=os.environ | {"PYTHONPATH": os.getcwd()},  # noqa: PTH109
        capture_output=True,
        check=False,
    )
    assert done.returncode == 130
    assert b"Ctrl-C: ending after this iteration; Ctrl-C again ends it at once." in done.stderr
    assert not (tmp_path / "last.ckpt").exists()


def test_handlers_of_the_users_own_are_left_alone(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        assert fit(tmp_path, Send(2, signal.SIGUSR1)) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert iterations(tmp_path) == 6


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_ends_where_it_is(stage: str, tmp_path: Path) -> None:
    hook = {"validate": "on_validation_batch_start", "test": "on_test_batch_start"}.get(
        stage, "on_predict_batch_start"
    )
    send = Send(0, signal.SIGTERM, hook=hook)
    run = trainer(send, StopOnSignal(), folder=tmp_path, validate_every=1)
    with pytest.raises(SystemExit) as end:
        getattr(run, stage)(PPO(), datamodule=data())
    assert end.value.code == 143


def test_says_so_if_the_module_is_another(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="The callback StopOnSignal works with PPO"):
        trainer(StopOnSignal(), folder=tmp_path).fit(Other(), datamodule=data())


def requeued(rank: int, folder: Path, numbers: tuple[int, ...], receiver: int) -> int:
    """The exit code of a rank of a job on SLURM."""
    (folder / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {folder}/requeued\n")
    (folder / "scontrol").chmod(0o755)
    ranks = world_size()
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.items():
            patch.setenv(name, value)
        send = Send(2, *numbers, rank=receiver)
        strategy = "ddp" if ranks > 1 else "auto"
        return fit(folder, send, plugins=[SLURMEnvironment()], devices=ranks, strategy=strategy)


def test_slurm_requeues_after_the_iteration_and_training_goes_on(tmp_path: Path) -> None:
    assert requeued(0, tmp_path, (signal.SIGUSR1,), 0) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["ppo"]["env_steps"] == 3 * STEPS_PER_ITERATION
    assert iterations(tmp_path) == 6


@pytest.mark.parametrize("receiver", [0, 1])
class TestTwoRanks:
    def test_both_end_if_one_is_told_to(self, tmp_path: Path, receiver: int) -> None:
        assert run_ranks(stopped, tmp_path, receiver) == [143, 143]
        assert iterations(tmp_path, ranks=2) == 3

    def test_both_save_if_slurm_tells_one_to_requeue(self, tmp_path: Path, receiver: int) -> None:
        assert run_ranks(requeued, tmp_path, (signal.SIGUSR1, signal.SIGTERM), receiver) == [143, 143]
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        # The second signal is agreed upon in the next iteration.
        assert iterations(tmp_path, ranks=2) == 4


def stopped(rank: int, folder: Path, receiver: int) -> int:
    return fit(folder, Send(2, signal.SIGTERM, rank=receiver), devices=2, strategy="ddp")
