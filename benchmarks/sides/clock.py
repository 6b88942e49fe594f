"""Times iterations, on the number of threads that is faster."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from sides.work import Work

_WARM_UP, _TIMED = 0, -1


class Clock:
    """Times iterations after a warm-up, with the better of one and two threads.

    Args:
        work: Says how many iterations of each kind.
        threads: Of torch; if not given, both numbers are tried in turn.

    Attributes:
        threads: The number that was used.
        total: Iterations in all.
    """

    def __init__(self, work: Work, threads: int | None = None) -> None:
        numbers = [1, 2][: os.cpu_count()] if threads is None else []
        self._plan = [_WARM_UP] * work.warm_up + numbers * work.probes + [_TIMED] * work.iterations
        self._steps = work.steps * work.iterations
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._at = -1
        self._running = False
        self.threads = threads
        self.total = len(self._plan)

    def tick(self) -> bool:
        """Note the beginning of an iteration, or the end of the last; returns whether that was the last."""
        self.pause()
        self._at += 1
        if self._at == self.total:
            return True
        kind = self._plan[self._at]
        if kind == _TIMED and self.threads is None:
            self.threads = min((n for n in self._seconds if n > 0), key=lambda n: min(self._seconds[n]))
        wanted = kind if kind > 0 else self.threads
        if wanted is not None and wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        self._running, self._began = True, time.perf_counter()
        return False

    def pause(self) -> None:
        """Let the present iteration end here, if it has not yet."""
        if self._running:
            self._seconds[self._plan[self._at]].append(time.perf_counter() - self._began)
        self._running = False

    @property
    def begun(self) -> bool:
        """Whether the first iteration has begun."""
        return self._at >= 0

    @property
    def timing(self) -> bool:
        """Whether the present iteration is one of those that count."""
        return 0 <= self._at < self.total and self._plan[self._at] == _TIMED

    @property
    def seconds(self) -> float:
        """Of the timed iterations."""
        return sum(self._seconds[_TIMED])

    def result(self, mean_return: float) -> dict[str, float | None]:
        """What a side reports.

        Args:
            mean_return: Of the last 100 episodes; NaN if none has ended.
        """
        return {
            "sps": self._steps / self.seconds,
            "seconds": self.seconds,
            "threads": self.threads or torch.get_num_threads(),
            "return": None if math.isnan(mean_return) else mean_return,
        }


class SolveClock:
    """Seconds and steps until the mean return of 100 episodes reaches 475, or ``limit`` steps are over."""

    THRESHOLD = 475.0

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self._began: float | None = None

    def begin(self) -> None:
        """Before the first rollout."""
        self._began = time.perf_counter()

    def over(self, steps: int, episodes: int, mean_return: Callable[[], float]) -> bool:
        """Whether to stop.

        Args:
            steps: Environment steps so far.
            episodes: Episodes so far.
            mean_return: Of the last 100.
        """
        assert self._began is not None
        solved = episodes >= 100 and mean_return() >= self.THRESHOLD
        if not solved and steps < self.limit:
            return False
        self.outcome = {
            "seconds": time.perf_counter() - self._began,
            "steps": steps,
            "return": mean_return(),
            "threads": torch.get_num_threads(),
            "solved": solved,
        }
        return True
