"""The gradients of one minibatch, microbatch by microbatch, in as much memory as there is."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from puffer_lightning.distributed import shares_data, world_size
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.loss import STATISTICS
from puffer_lightning.rollout import CACHED_ROWS, Batch

LossFunction = Callable[[Policy, Batch], tuple[Tensor, Tensor]]
"""A microbatch's loss and sums of ``STATISTICS``."""
Finish = Callable[[Sequence[nn.Parameter]], object]
"""See :func:`~puffer_lightning.distributed.finish_reduction`."""


def minibatch_gradients(
    policy: Policy,
    take: Callable[[Tensor], Batch],
    indices: Tensor,
    loss_function: LossFunction,
    config: PPOConfig,
    *,
    backward: Callable[[Tensor], object],
    no_sync: Callable[[], AbstractContextManager[object]],
    finish: Finish | None = None,
) -> Tensor:
    """Add a minibatch's gradients to the parameters'.

    If a GPU's memory does not suffice for that, this rank begins the minibatch anew, by itself, in twice as
    many microbatches, and sets ``config.accumulate_grad_batches`` to these. The gradients are the same.

    Args:
        policy: The policy, as the strategy set it up; no parameter has a gradient.
        take: The transitions or sequences of these indices.
        indices: Of the minibatch's.
        loss_function: The loss.
        config: The coefficients.
        backward: Runs the backward pass of a loss.
        no_sync: See :func:`~puffer_lightning.ppo.update`.
        finish: Likewise.

    Returns:
        The minibatch's sums [5] of ``STATISTICS``.

    Raises:
        ConfigurationError: A single transition is too much for the memory, or each rank has only a part of
            the policy, so that none can begin anew by itself.
    """
    parts = indices.chunk(num_parts(indices, config))
    inner: Policy = getattr(policy, "module", policy)
    statistics: Tensor | None = None
    before: Sequence[int | None] | None = None
    try:
        for number, rows in enumerate(parts, start=1):
            last = number == len(parts)
            if last and finish is not None:
                # There are no gradients before the first backward pass.
                before = _versions(inner) if number > 1 else ()
            with nullcontext() if last else no_sync():
                loss, of_part = loss_function(policy, take(rows))
                backward(loss)
            statistics = of_part if statistics is None else statistics + of_part
        assert statistics is not None
        return statistics
    except torch.OutOfMemoryError as failure:
        if inner.sharding is not None or shares_data():
            # Other ranks are waiting for this one within the policy.
            raise ConfigurationError(
                "Out of memory with a policy that is divided among ranks: set accumulate_grad_batches to "
                f"{2 * len(parts)}."
            ) from failure
        missing = _trained(inner)
        if before is not None:
            pairs = zip(missing, before or [None] * len(missing), _versions(inner), strict=True)
            missing = [parameter for parameter, old, new in pairs if old == new]
    # Only here has the traceback let go of the graph.
    statistics = _in_smaller_parts(inner, missing, take, indices, loss_function, config)
    if finish is not None:
        finish(missing)
    return statistics


def num_parts(indices: Tensor, config: PPOConfig) -> int:
    """Microbatches, on a lone CPU as many at least as leave each small enough for its caches."""
    if indices.device.type != "cpu" or world_size() > 1:
        return config.accumulate_grad_batches
    return max(config.accumulate_grad_batches, math.ceil(len(indices) / CACHED_ROWS))


def _trained(policy: Policy) -> list[nn.Parameter]:
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _versions(policy: Policy) -> list[int | None]:
    """What changes as soon as a backward pass has added to a parameter's gradient."""
    gradients = (parameter.grad for parameter in _trained(policy))
    return [None if gradient is None else gradient._version for gradient in gradients]


def _in_smaller_parts(
    policy: Policy,
    parameters: Sequence[nn.Parameter],
    take: Callable[[Tensor], Batch],
    indices: Tensor,
    loss_function: LossFunction,
    config: PPOConfig,
) -> Tensor:
    """Set the gradients of these parameters, past ``AccumulateGrad``, whose hooks would begin to reduce."""
    for parameter in parameters:
        parameter.grad = None
    while config.accumulate_grad_batches < len(indices):
        config.accumulate_grad_batches = min(2 * config.accumulate_grad_batches, len(indices))
        if indices.is_cuda:
            torch.cuda.empty_cache()
        gradients: list[Tensor | None] = [None] * len(parameters)
        statistics = torch.zeros(len(STATISTICS), device=indices.device)
        try:
            for rows in indices.chunk(config.accumulate_grad_batches):
                loss, of_part = loss_function(policy, take(rows))
                of_rows: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
                pairs = zip(gradients, of_rows, strict=True)
                gradients = [new if old is None else old if new is None else old + new for old, new in pairs]
                statistics += of_part
        except torch.OutOfMemoryError:
            continue
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # In the parameter's own layout, as ``AccumulateGrad`` would: fused optimizers rely on it.
            parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)
        return statistics
    raise ConfigurationError(
        "Out of memory even with microbatches of 1: set data.num_envs or data.horizon lower, or choose a "
        "smaller policy."
    )
