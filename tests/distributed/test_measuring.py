"""What the profiler sees of collectives: of two real ranks, and of made-up GPUs."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.distributed import Communication, CommunicationMeter
from puffer_lightning.distributed.measuring import summarize
from tests.distributed.processes import run_ranks

PARAMETERS = 8 * 4 + 4


def by_name() -> None:
    dist.all_reduce(torch.ones(100, dtype=torch.float64))
    dist.broadcast(torch.ones(3, dtype=torch.int64), 0)
    dist.all_gather([torch.empty(6), torch.empty(6)], torch.ones(6))
    dist.barrier()


def by_ddp() -> None:
    model = DistributedDataParallel(nn.Linear(8, 4))
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()


def by_fsdp() -> None:
    model = fully_shard(nn.Linear(8, 4), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 8)).sum().backward()


def measure(rank: int) -> dict[str, dict[str, tuple[int, int, bool]]]:
    seen = {}
    for run in (by_name, by_ddp, by_fsdp):
        meter = CommunicationMeter()
        meter.start()
        run()
        measured = meter.stop()
        assert 0 <= measured.exposed_seconds <= measured.seconds <= measured.iteration_seconds
        seen[run.__name__] = {
            name: (traffic.count, traffic.bytes, traffic.seconds > 0)
            for name, traffic in measured.traffic.items()
            if traffic.count
        }
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, tuple[int, int, bool]]]:
    one, other = run_ranks(measure)
    assert one.keys() == other.keys()
    return one


def test_collectives_called_by_name(seen: dict[str, Any]) -> None:
    assert seen["by_name"] == {
        "all_reduce": (1, 800, True),
        "broadcast": (1, 24, True),
        "all_gather": (1, 48, True),
        "other": (1, 0, True),
    }


def test_those_of_ddps_reducer(seen: dict[str, Any]) -> None:
    count, size, _ = seen["by_ddp"]["all_reduce"]
    assert (count, size) == (2, 2 * 4 * PARAMETERS)


def test_those_of_fsdp(seen: dict[str, Any]) -> None:
    assert {"all_gather", "reduce_scatter"} <= seen["by_fsdp"].keys()
    assert seen["by_fsdp"]["reduce_scatter"] == (1, 4 * PARAMETERS, True)


@dataclass
class Event:
    """As kineto's, times in seconds."""

    named: str
    begin: float
    end: float
    size: list[int] = field(default_factory=list)
    gpu: bool = False

    def name(self) -> str:
        return self.named

    def start_ns(self) -> int:
        return int(self.begin * 1e9)

    def end_ns(self) -> int:
        return int(self.end * 1e9)

    def duration_ns(self) -> int:
        return self.end_ns() - self.start_ns()

    def device_type(self) -> Any:
        return DeviceType.CUDA if self.gpu else DeviceType.CPU

    def shapes(self) -> list[list[int]]:
        return [self.size]

    def dtypes(self) -> list[str]:
        return ["float"]


def seconds(measured: Communication) -> tuple[float, float]:
    return measured.seconds, measured.exposed_seconds


def test_what_is_computed_meanwhile_is_not_exposed() -> None:
    events = [
        Event("c10d::allreduce_", 1, 2),
        Event("gloo:all_reduce", 1, 5, [10]),
        Event("c10d::broadcast_", 4, 5),
        Event("gloo:broadcast", 4, 7, [10]),
        Event("aten::mm", 0, 2),
        Event("aten::add", 3, 4),
        Event("aten::add_", 3.5, 4.5),
    ]
    measured = summarize(reversed(events), iteration_seconds=10)
    # Under way from 1 to 7; computing from 1 to 2 and from 3 to 4.5 of it.
    assert seconds(measured) == (6, 3.5)
    assert measured.traffic["all_reduce"].seconds == 4
    assert measured.traffic["broadcast"].seconds == 3
    assert measured.iteration_seconds == 10


def test_what_gloo_makes_of_a_collective_counts_as_what_was_called() -> None:
    events = [
        Event("c10d::_reduce_scatter_base_", 0, 1),
        Event("c10d::allreduce_", 1, 2),
        Event("gloo:all_reduce", 3, 4, [5]),
        Event("gloo:all_reduce", 4, 6, [7]),
    ]
    traffic = summarize(events, iteration_seconds=10).traffic
    assert (traffic["reduce_scatter"].bytes, traffic["all_reduce"].bytes) == (20, 28)


def test_on_gpus_kernels_count() -> None:
    events = [
        Event("c10d::_reduce_scatter_base_", 0, 1),
        Event("nccl:_reduce_scatter_base", 0, 1, [5]),
        Event("aten::mm", 0, 100),
        Event(
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 6, gpu=True
        ),
        Event("gemm", 5, 9, gpu=True),
    ]
    measured = summarize(events, iteration_seconds=10)
    assert seconds(measured) == (4, 3)
    traffic = measured.traffic["reduce_scatter"]
    assert (traffic.count, traffic.bytes, traffic.seconds) == (1, 20, 4)
