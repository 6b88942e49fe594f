"""How long collectives take, which they are and how much they carry, as torch's profiler sees them.

That is every collective: those of DDP's reducer and of FSDP2, functional ones and those called by name, on
gloo and NCCL alike. A wrapper around ``torch.distributed`` would not see the first.
"""

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from puffer_lightning.distributed.collectives import world_size
from puffer_lightning.distributed.exchange import NAME

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "other")

_BYTES = {
    "double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2,
}  # fmt: skip

Interval = tuple[int, int]


@dataclass
class Traffic:
    """The collectives of one kind within an iteration.

    Attributes:
        count: How many.
        bytes: Of the tensors that were reduced, gathered, scattered or sent, each as a whole.
        seconds: From the call to the result, waiting for other ranks included.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Communication:
    """What a rank sent and received within an iteration.

    Attributes:
        traffic: By the names in ``COLLECTIVES``.
        seconds: Time during which at least one collective was under way.
        exposed_seconds: The part of it in which this rank computed nothing.
        iteration_seconds: Of the whole iteration.
    """

    traffic: dict[str, Traffic] = field(default_factory=lambda: {name: Traffic() for name in COLLECTIVES})
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    iteration_seconds: float = 0.0


class CommunicationMeter:
    """Measures between ``start`` and ``stop``.

    The profiler notes every operator, which takes some microseconds each, so a few iterations of many are
    enough to measure.
    """

    def start(self) -> None:
        """Begin an iteration."""
        # Else each start and stop leaves a line on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = profile(use_device=device, record_shapes=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._began = time.perf_counter()

    def stop(self) -> Communication:
        """End it."""
        seconds = time.perf_counter() - self._began
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        assert self._profile.kineto_results is not None
        return summarize(self._profile.kineto_results.events(), seconds)


def summarize(events: Iterable[Any], iteration_seconds: float) -> Communication:
    """Pick the collectives out of a profile.

    A call ``c10d::…`` says which collective it is, and a ``gloo:…`` or ``nccl:…`` that begins later how much
    it carries and, on CPUs, until when. On GPUs that ends before the work does, so there the kernels count:
    those of NCCL as collectives, the others as computing. On CPUs every ``aten::…`` is computing.

    Args:
        events: Of the profiler, as kineto has them.
        iteration_seconds: Of the profiled iteration.
    """
    events = sorted(events, key=lambda event: event.start_ns())
    on_gpu = [event for event in events if event.device_type() == DeviceType.CUDA]
    calls = [event for event in events if event.name().startswith("c10d::")]
    measured = Communication(iteration_seconds=iteration_seconds)
    under_way: list[Interval] = []
    computing: list[Interval] = []
    for event in events:
        if event.device_type() == DeviceType.CPU and event.name().startswith(("gloo:", "nccl:", f"{NAME}:")):
            name = _take_kind(event, calls)
            traffic = measured.traffic[name]
            traffic.count += 1
            traffic.bytes += _payload(event, name)
            if not on_gpu:
                traffic.seconds += event.duration_ns() / 1e9
                under_way.append(_interval(event))
        elif event.name().startswith("aten::") and not on_gpu:
            computing.append(_interval(event))
    for event in on_gpu:
        if event.name().startswith("nccl"):
            measured.traffic[_kind(event.name())].seconds += event.duration_ns() / 1e9
            under_way.append(_interval(event))
        else:
            computing.append(_interval(event))
    under_way, computing = _union(under_way), _union(computing)
    measured.seconds = _length(under_way)
    measured.exposed_seconds = measured.seconds - _overlap(under_way, computing)
    return measured


def _take_kind(event: Any, calls: list[Any]) -> str:
    """Which collective a backend works on; the first call that can have led to it is taken off the list."""
    here = _kind(event.name())
    for number, call in enumerate(calls):
        kind = _kind(call.name())
        # gloo scatters what it has reduced everywhere.
        if kind == here or (kind, here) == ("reduce_scatter", "all_reduce"):
            del calls[number]
            return kind
    return here


def _kind(name: str) -> str:
    """Which collective a call (``c10d::_allgather_base_``) or a kernel (``ncclDevKernel_AllGather…``) is."""
    plain = name.lower().replace("_", "")
    return next((kind for kind in COLLECTIVES if kind.replace("_", "") in plain), "other")


def _payload(event: Any, kind: str) -> int:
    # Of a gathered tensor the backend sees this rank's part.
    parts = world_size() if kind == "all_gather" else 1
    tensors = [(shape, dtype) for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False) if shape]
    sizes: list[int] = [math.prod(shape) * _BYTES.get(dtype, 1) for shape, dtype in tensors]
    return parts * sum(sizes)


def _interval(event: Any) -> Interval:
    return event.start_ns(), event.end_ns()


def _union(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9


def _overlap(ones: list[Interval], others: list[Interval]) -> float:
    """Seconds that two unions have in common."""
    return _length(ones) + _length(others) - _length(_union(ones + others))
