"""The phases of an iteration, for whoever wants to know how long each takes."""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ROLLOUT_PHASES = ("env", "policy", "copy")
UPDATE_PHASES = ("gather", "forward", "backward", "step")


class Measure(Protocol):
    """Makes of a function one that is measured, as part of a phase."""

    def __call__(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function to call instead.

        Args:
            phase: ``rollout/…`` of ``ROLLOUT_PHASES`` or ``update/…`` of ``UPDATE_PHASES``.
            function: What belongs to it.
        """
        ...


def unmeasured(phase: str, function: Callable[P, R]) -> Callable[P, R]:
    """The function itself, so that what nobody measures costs nothing."""
    return function
