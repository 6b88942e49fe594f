import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from puffer_lightning.distributed import TIMEOUT
from puffer_lightning.engines.processes import prepare_processes, ranks_to_launch
from puffer_lightning.errors import ConfigurationError
from tests.distributed.processes import free_port


@pytest.fixture(autouse=True)
def _rank_zero_again() -> Iterator[None]:
    """A Trainer on another machine tells all of Lightning that this is another rank."""
    yield
    rank_zero_only.rank = 0  # type: ignore[attr-defined]


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**({"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False} | options))


def under_torchrun(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "run",
        "WORLD_SIZE": str(processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)


def test_torchrun_and_the_trainer_have_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, processes=3)
    with pytest.raises(
        ConfigurationError,
        match=r"3 processes were started, but trainer\.devices 2 × trainer\.num_nodes 1 are 2: make these as",
    ):
        prepare_processes(trainer())
    under_torchrun(monkeypatch, processes=2)
    agreed = trainer()
    prepare_processes(agreed)
    assert ranks_to_launch(agreed) is None


@pytest.mark.parametrize(("backend", "reason"), [("nccl", "needs GPUs"), ("pigeon", "is built without")])
def test_a_backend_that_is_not_there_is_refused(backend: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"trainer\.strategy is {backend}, which .*{reason}: leave"):
        prepare_processes(trainer(strategy=DDPStrategy(process_group_backend=backend)))


def test_more_processes_than_processors_take_turns() -> None:
    with pytest.warns(UserWarning, match=r"trainer\.devices \d+ are more processes than the \d+ processors"):
        prepare_processes(trainer(devices=(os.cpu_count() or 1) + 1))


def test_ranks_wait_for_each_other_as_long_as_told() -> None:
    theirs, ours = DDPStrategy(timeout=timedelta(seconds=7)), DDPStrategy()
    for strategy in (theirs, ours):
        prepare_processes(trainer(strategy=strategy))
    assert theirs._timeout == timedelta(seconds=7)
    assert ours._timeout == TIMEOUT


def test_ranks_that_are_to_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_to_launch(trainer(devices=1, strategy="auto")) is None
    assert ranks_to_launch(trainer(strategy="ddp_spawn")) is None
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    monkeypatch.setenv("NODE_RANK", "1")
    assert ranks_to_launch(trainer(num_nodes=3)) == (
        2,
        2,
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "1", "WORLD_SIZE": "6"},
    )


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            ConfigurationError, match=rf"MASTER_PORT {port} cannot be used \(Address already in"
        ):
            ranks_to_launch(trainer())
        monkeypatch.setenv("NODE_RANK", "1")
        assert ranks_to_launch(trainer()) is not None, "the port is one of another machine"
