"""Ranks exchange tensors through memory as they would through gloo; ranks that fail: tests/test_launch.py."""

import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.distributed import exchange_gradients, global_sum
from puffer_lightning.distributed.exchange import _open, exchange_for
from tests.distributed.processes import run_ranks

TENSORS = {
    "number": torch.tensor(1.5),
    "nothing": torch.ones(0),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "counts": torch.arange(5),
    "half": torch.linspace(-1, 1, 9, dtype=torch.bfloat16),
    "matrix": torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
}


def summed(rank: int, tensors: dict[str, Tensor]) -> list[tuple[str, bool]]:
    equal = []
    for name, tensor in tensors.items():
        through_memory, through_gloo = (tensor.clone() + rank for _ in range(2))
        exchange = exchange_for(tensor)
        assert exchange is not None
        exchange.sum(through_memory)
        through_gloo = through_gloo.contiguous()
        dist.all_reduce(through_gloo)
        equal.append((name, torch.equal(through_memory, through_gloo)))
    return equal


def test_sums_are_those_of_gloo() -> None:
    assert run_ranks(summed, TENSORS) == [[(name, True) for name in TENSORS]] * 2


def hurried(rank: int, times: int) -> int:
    """How often a sum or a row was wrong, among ranks that come at random times."""
    ranks, delays, wrong = dist.get_world_size(), random.Random(rank), 0
    for number in range(times):
        if delays.random() < 0.05:
            time.sleep(delays.random() * 0.01)
        mine = torch.full((1 + number % 1000,), float(number * ranks + rank))
        exchange = exchange_for(mine)
        assert exchange is not None
        if number % 3:
            exchange.sum(mine)
            wrong += not (mine == ranks * ranks * number + sum(range(ranks))).all()
        else:
            rows = exchange.gather(mine)
            wrong += rows[:, -1].tolist() != [float(number * ranks + other) for other in range(ranks)]
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_sees_what_another_has_put_there_too_early_or_too_late(ranks: int) -> None:
    assert run_ranks(hurried, 2000, ranks=ranks) == [0] * ranks


def with_nan(rank: int) -> list[bool]:
    return global_sum(torch.tensor([float("nan") if rank else 1.0, 1.0])).isnan().tolist()  # type: ignore[no-any-return]


def test_what_is_not_a_number_stays_so() -> None:
    assert run_ranks(with_nan) == [[True, False]] * 2


def large(rank: int) -> tuple[bool, float]:
    x = torch.ones(2**19)
    return exchange_for(x) is None, global_sum(x).mean().item()


def test_what_is_large_goes_the_usual_way() -> None:
    assert run_ranks(large) == [(True, 2.0)] * 2


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def opened(rank: int, broken: int) -> tuple[bool, bool]:
    """Whether the memory is used though one rank could not open it, and whether that left a file open."""
    files, group = open_files(), dist.group.WORLD
    assert group is not None
    with mock.patch.object(os, "memfd_create" if broken == 0 else "open", side_effect=OSError):
        exchange = _open(group) if rank == broken else None
    if rank != broken:
        exchange = _open(group)
    return exchange is not None, open_files() > files


@pytest.mark.parametrize("broken", [0, 1])
def test_if_one_rank_cannot_open_the_memory_none_uses_it(broken: int) -> None:
    assert run_ranks(opened, broken) == [(False, False)] * 2


def reopened(rank: int) -> int:
    files, group = open_files(), dist.group.WORLD
    assert group is not None
    for _ in range(3):
        exchange = _open(group)
        assert exchange is not None
        del exchange
    return open_files() - files


def test_nothing_stays_open_once_it_is_dropped() -> None:
    assert run_ranks(reopened) == [0, 0]


def averaged(rank: int, through_memory: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)))
    if through_memory:
        exchange_gradients(model)
    for number in range(3):
        torch.manual_seed(10 * number + rank)
        model(torch.randn(5, 8)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_averaged_as_ddp_does() -> None:
    ours, ddps = (run_ranks(averaged, through_memory) for through_memory in (True, False))
    for gradients in zip(*ours, *ddps, strict=True):
        assert all(torch.equal(gradients[0], other) for other in gradients[1:])
