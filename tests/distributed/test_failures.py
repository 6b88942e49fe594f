"""Failures as torch reports them, and what they mean; whole runs that fail are in tests/test_launch.py."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from puffer_lightning.distributed import (
    explanation,
    has_backend,
    is_first_failure,
    lost_connection,
    seconds_waited,
    silent_ranks,
)
from tests.distributed.processes import free_port, run_ranks


def store(port: int, host: str = "127.0.0.1", ranks: int | None = None, main: bool = False) -> dist.TCPStore:
    return dist.TCPStore(host, port, ranks, main, timedelta(seconds=1))


def why(port: int, host: str = "127.0.0.1", ranks: int | None = None, main: bool = False) -> str | None:
    with pytest.raises(dist.DistError) as raised:
        store(port, host, ranks, main)
    return explanation(raised.value)


def test_a_port_in_use_is_named() -> None:
    first = store(0, main=True)
    assert str(why(first.port, main=True)).startswith("MASTER_PORT is in use: set it to a free port")


def test_a_rank_0_that_does_not_answer_is_named() -> None:
    port = free_port()
    assert str(why(port)).startswith(
        f"rank 0 did not answer at MASTER_ADDR 127.0.0.1, MASTER_PORT {port} within 1 seconds: start all"
    )


def test_ranks_that_do_not_come_are_counted() -> None:
    assert str(why(0, ranks=2, main=True)).startswith("only 1 of 2 ranks came to MASTER_ADDR within")


def test_other_failures_are_not_explained() -> None:
    assert explanation(ValueError("the pole broke")) is None
    assert not lost_connection(ValueError("the pole broke"))
    assert seconds_waited(ValueError("the pole broke")) is None


def test_what_a_failure_comes_from_counts() -> None:
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Timed out waiting 2500ms")
    later = ValueError("in cleaning up")
    later.__context__ = lost
    assert lost_connection(later)
    assert seconds_waited(later) == 2.5
    assert seconds_waited(RuntimeError("Watchdog: (OpType=ALLREDUCE, Timeout(ms)=600000) ran for")) == 600


def test_a_lone_process_is_the_first_to_fail_and_misses_nobody() -> None:
    assert is_first_failure()
    assert is_first_failure()
    assert silent_ranks() == []


def both_fail(rank: int) -> tuple[bool, list[int]]:
    return is_first_failure(), silent_ranks()


def test_one_of_several_ranks_is_the_first_to_fail() -> None:
    outcomes = run_ranks(both_fail)
    assert sorted(first for first, _ in outcomes) == [False, True]
    assert [silent for _, silent in outcomes] == [[], []]


def test_backends_are_known() -> None:
    assert has_backend("gloo")
    assert not has_backend("carrier_pigeon")


_ENDS_AT_ONCE = """
import puffer_lightning.distributed, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1000))
"""


@pytest.mark.slow
def test_a_rank_may_end_right_after_it_has_sent_something() -> None:
    def start(port: int, rank: int) -> subprocess.Popen[bytes]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | place
        return subprocess.Popen([sys.executable, "-c", _ENDS_AT_ONCE], env=environment)

    for _ in range(3):
        pairs = [(start(port, 0), start(port, 1)) for port in (free_port(), free_port())]
        assert [process.wait(60) for pair in pairs for process in pair] == [0] * 4
