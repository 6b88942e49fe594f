"""An optimizer step, unless its gradients are no numbers."""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer itself: what a wrapper holds as its ``optimizer``, if it is one."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def count_step(optimizer: Optimizer) -> None:
    """Tell a wrapper that counts steps, by its own ``count_step``, of one that was taken past it."""
    if hasattr(optimizer, "count_step"):
        optimizer.count_step()


def step_if_finite(optimizer: Optimizer, norm: Tensor) -> None:
    """Take an optimizer step, or leave parameters and optimizer state as they are if the norm is not finite.

    On a GPU a fused optimizer is told by torch's ``found_inf``, which nothing waits for; for any other one
    the norm is read. Ranks whose norms are equal decide alike.

    Args:
        optimizer: Anything with ``step`` and ``zero_grad``; what it wraps, if so, is its ``optimizer``.
        norm: Scalar, of all gradients together.
    """
    inner = unwrapped(optimizer)
    if norm.is_cuda and all(group.get("fused") for group in inner.param_groups):
        step_unless(norm.isfinite().logical_not(), optimizer)
        return
    if not math.isfinite(norm):
        # It then steps without gradients, which changes nothing, and whoever counts steps counts this one.
        optimizer.zero_grad()
    optimizer.step()


def step_unless(skip: Tensor, optimizer: Optimizer) -> None:
    """Take a fused optimizer's step unless ``skip``, a bool scalar on its device, which is not read here."""
    inner: Any = unwrapped(optimizer)
    inner.found_inf = skip.float()
    try:
        optimizer.step()
    finally:
        del inner.found_inf
