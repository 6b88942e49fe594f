"""The optimizer and its learning-rate schedule, from what the user chose."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.functional import SCHEDULES, warm_up

Schedule = Literal["constant", "linear", "cosine"] | LRSchedulerCallable
LRScaling = Literal["none", "linear", "sqrt"]

_SCALINGS: dict[str, Callable[[int], float]] = {"none": lambda ranks: 1.0, "linear": float, "sqrt": math.sqrt}


def check_schedule(schedule: Schedule, warm_up_share: float) -> None:
    """Refuse options of the learning-rate schedule that cannot work.

    Raises:
        ConfigurationError: The schedule is unknown, or the share out of range or without effect.
    """
    if not 0 <= warm_up_share < 1:
        raise ConfigurationError(f"warm_up_share is {warm_up_share}: set it to 0 or more, and below 1.")
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ConfigurationError(
            f"lr_schedule is {schedule}: set it to {', '.join(SCHEDULES)} or a torch scheduler."
        )
    if warm_up_share and not isinstance(schedule, str):
        raise ConfigurationError(
            f"warm_up_share {warm_up_share} does not go with a torch scheduler as lr_schedule: leave one "
            "of them out."
        )


def check_scaling(lr_scaling: LRScaling) -> None:
    """Refuse a scaling of the learning rate that does not exist.

    Raises:
        ConfigurationError: It is unknown.
    """
    if lr_scaling not in _SCALINGS:
        raise ConfigurationError(f"lr_scaling is {lr_scaling}: set it to {', '.join(_SCALINGS)}.")


def make_optimizer(
    make: OptimizerCallable, parameters: Iterable[Tensor], lr_scaling: LRScaling = "none", ranks: int = 1
) -> Optimizer:
    """The optimizer of these parameters.

    Args:
        make: Makes it.
        parameters: What it trains.
        lr_scaling: How its learning rates grow with ``ranks``: linearly (Goyal et al. 2017, section 2.1,
            arXiv 1706.02677), with their square root (Krizhevsky 2014, section 5, arXiv 1404.5997) or not.
        ranks: Number of ranks.

    Raises:
        ConfigurationError: It cannot be made, or needs a closure.
    """
    try:
        optimizer = make(parameters)
    except (TypeError, ValueError) as problem:
        raise ConfigurationError(f"optimizer cannot be made, correct its options: {problem}") from problem
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError("optimizer LBFGS needs a closure: choose another torch optimizer.")
    for group in optimizer.param_groups:
        group["lr"] *= _SCALINGS[lr_scaling](ranks)
        if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) > 1:
            # One kernel for all does not take parameters that are divided among different ranks.
            group.update({option: False for option in ("foreach", "fused") if option in group})
    return optimizer


def make_scheduler(
    schedule: Schedule, warm_up_share: float, optimizer: Optimizer, progress: Callable[[], float]
) -> LRScheduler:
    """The scheduler of this optimizer, to be stepped once an iteration.

    Args:
        schedule: A name among ``SCHEDULES``, or what makes a torch scheduler.
        warm_up_share: See :func:`~puffer_lightning.functional.warm_up`.
        optimizer: The optimizer.
        progress: The share of the run's environment steps that is done.

    Raises:
        ConfigurationError: It cannot be made, or needs a metric.
    """
    if isinstance(schedule, str):
        shape = SCHEDULES[schedule]
        return LambdaLR(optimizer, lambda _: shape(progress()) * warm_up(progress(), warm_up_share))
    try:
        scheduler = schedule(optimizer)
    except (TypeError, ValueError) as problem:
        raise ConfigurationError(f"lr_schedule cannot be made, correct its options: {problem}") from problem
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "lr_schedule ReduceLROnPlateau needs a metric: choose another torch scheduler."
        )
    return scheduler


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each of an optimizer's parameter groups, as they are now."""
    return [
        {name: option for name, option in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def apply_options(optimizer: Optimizer, scheduler: LambdaLR, options: list[dict[str, Any]]) -> None:
    """Let the options of an optimizer as it was made win over those that a checkpoint brought.

    Args:
        optimizer: With the checkpoint's state.
        scheduler: Its scheduler, likewise.
        options: ``options_of`` the optimizer before the checkpoint was loaded.
    """
    for group, made_with in zip(optimizer.param_groups, options, strict=True):
        group.update(made_with)
        group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](0)
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
