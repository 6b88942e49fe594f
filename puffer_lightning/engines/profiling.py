"""Lightning's profilers see the phases of an iteration; ``PhaseProfiler`` sees nothing else."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from puffer_lightning.rollout.phases import ROLLOUT_PHASES, UPDATE_PHASES, Measure, P, R, unmeasured

# What Lightning calls an epoch, which is an iteration here.
_ITERATION = "run_training_epoch"
_LEFT_OUT = 2
_PARTS = {"rollout": ROLLOUT_PHASES, "update": UPDATE_PHASES}
_NAMES = {_ITERATION, *_PARTS, *(f"{part}/{phase}" for part, phases in _PARTS.items() for phase in phases)}


def measure_with(trainer: L.Trainer) -> Measure:
    """What has the phases measured by the Trainer's profiler, or leaves them alone if it has none.

    Args:
        trainer: Set up with ``profiler``.
    """
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(profiler, PassThroughProfiler):
        return unmeasured

    def measure(phase: str, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            with profiler.profile(phase):
                return function(*args, **kwargs)

        return measured

    return measure


class NoProfiler(PassThroughProfiler):
    """Measures nothing, as Lightning's own, which makes a generator at each of 50 hooks an iteration."""

    _nothing = nullcontext()

    @override
    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._nothing


class PhaseProfiler(Profiler):
    """Where the time of an iteration goes, as a table when training ends.

    Means over all iterations but the first two, which allocate and compile: of stepping the environments, of
    the policy's acting and of writing what both return to the rollout; of gathering a minibatch, of its loss,
    of the gradients and of the optimizer's step with the clipping before it; and of what is left of rollout,
    update and iteration.
    On GPUs it waits for them at the beginning and the end of each phase, so that each is charged with its
    own work; that and the measuring make a run a little slower.

    Args:
        dirpath: Folder of ``filename``; by default the logger's.
        filename: Write the table to this file, ``.txt``, instead of printing it.
    """

    def __init__(self, dirpath: str | None = None, filename: str | None = None) -> None:
        super().__init__(dirpath, filename)
        self._began: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._iterations = 0
        # As they were after none, one and two iterations.
        self._at_first: list[tuple[Mapping[str, float], Mapping[str, int]]] = [({}, {})]

    @override
    def start(self, action_name: str) -> None:
        if action_name in _NAMES:
            self._began[action_name] = _now()

    @override
    def stop(self, action_name: str) -> None:
        if action_name not in self._began:
            return
        self._seconds[action_name] += _now() - self._began.pop(action_name)
        self._calls[action_name] += 1
        if action_name == _ITERATION:
            self._iterations += 1
            if self._iterations <= _LEFT_OUT:
                self._at_first.append((dict(self._seconds), dict(self._calls)))

    def milliseconds(self) -> dict[str, float]:
        """Of an iteration, by phase; ``other`` and ``…/other`` are what is left of an iteration or a part."""
        of: dict[str, float] = {}
        for part, phases in _PARTS.items():
            for name in (part, *(f"{part}/{phase}" for phase in phases)):
                of[name] = 1000 * self._mean(self._seconds, name, 0)
            of[f"{part}/other"] = of[part] - sum(of[f"{part}/{phase}"] for phase in phases)
        iteration = 1000 * self._mean(self._seconds, _ITERATION, 0)
        return of | {"other": iteration - sum(of[part] for part in _PARTS), "iteration": iteration}

    @override
    def summary(self) -> str:
        # The evaluation after training has a summary, too, and no iterations of its own.
        if self._stage != "fit" or not self._iterations:
            return ""
        of = self.milliseconds()
        lines = [f"Mean of {self._counted} iterations:", f"{'phase':12}{'ms':>10}{'share':>8}{'calls':>8}"]
        for name, milliseconds in of.items():
            part, _, phase = name.partition("/")
            calls = f"{self._mean(self._calls, name, 1):8.0f}" if name in self._calls else ""
            title = f"  {phase}" if phase else part
            lines.append(f"{title:12}{milliseconds:10.3f}{milliseconds / of['iteration']:8.1%}{calls}")
        return "\n".join(lines)

    @property
    def _counted(self) -> int:
        return max(1, self._iterations - _LEFT_OUT)

    def _mean(self, sums: Mapping[str, float], name: str, which: int) -> float:
        """Over all iterations but the first two, or over the last one if there are no more."""
        first = self._at_first[max(0, self._iterations - self._counted)][which]
        return (sums.get(name, 0) - first.get(name, 0)) / self._counted


def _now() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
