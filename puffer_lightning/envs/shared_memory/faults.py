"""What can go wrong with an environment in another process, and how the user hears of it."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One thing that went wrong.

    Attributes:
        env_index: Which of the N environments.
        seed: What it was last seeded with; ``None`` if it never was.
        reason: One line.
        details: The traceback in the worker, where there is one.
    """

    env_index: int
    seed: int | None
    reason: str
    details: str = ""

    def __str__(self) -> str:
        text = f"environment {self.env_index} (seed {self.seed}): {self.reason}"
        return f"{text}\n\n{self.details}" if self.details else text


class EnvironmentFaultError(RuntimeError):
    """An environment raised, hung, lost its process or returned what is not finite.

    Attributes:
        fault: Which environment, with which seed, and what happened; the last one where there were several.
    """

    def __init__(self, fault: Fault, report: str = "") -> None:
        super().__init__(report or str(fault))
        self.fault = fault

    def __reduce__(self) -> "tuple[type[EnvironmentFaultError], tuple[Fault, str]]":
        return type(self), (self.fault, str(self))


class WorkerError(Exception):
    """In a worker, on its way to the trainer: what is wrong with which of its environments.

    Args:
        row: Index of the environment.
        reason: One line.
        details: The traceback, if there is one.
        fatal: Whether new environments would be of no help.
    """

    def __init__(self, row: int, reason: str, details: str = "", fatal: bool = False) -> None:
        super().__init__(row, reason, details, fatal)
        self.row, self.reason, self.details, self.fatal = row, reason, details, fatal


class EnvironmentFaultWarning(RuntimeWarning):
    """An environment was restarted, or a transition masked, and the run goes on."""
