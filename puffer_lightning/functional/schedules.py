"""Multipliers of the learning rate as functions of progress.

Progress is the share of the run's environment steps that is done: 0 at the first update, 1 at the end. A
run that overshoots, as a resumed or rounded-up one may, keeps the multiplier of the end.
"""

import math
from collections.abc import Callable

WARM_UP_START = 0.1
"""The multiplier that `warm_up` starts from. Not 0, which would waste the first rollout's whole update."""


def constant(progress: float) -> float:
    """1 throughout."""
    return 1.0


def linear(progress: float) -> float:
    """``1 - progress``: from 1 down to 0 in a straight line."""
    return max(1.0 - progress, 0.0)


def cosine(progress: float) -> float:
    """``½ (1 + cos(π · progress))``: from 1 down to 0 along half a cosine.

    Source: Loshchilov & Hutter 2017, eq. 5 without restarts, arXiv 1608.03983.
    """
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def warm_up(progress: float, share: float) -> float:
    """From `WARM_UP_START` up to 1 in a straight line over the first ``share`` of the run, then 1.

    Multiply it with a schedule's value to warm that schedule up.

    Args:
        progress: Share of the run that is done.
        share: Length of the warm-up as a share of the run in [0, 1]; 0 for none.

    Returns:
        The multiplier, in [`WARM_UP_START`, 1].
    """
    if progress >= share:
        return 1.0
    return WARM_UP_START + (1.0 - WARM_UP_START) * progress / share


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}
"""The schedules by the name they have in a configuration."""
