"""The terms of the PPO loss, one number a sample.

Nothing is reduced here. The caller weighs samples by its mask and divides by the count of the *whole*
minibatch, so that the gradients of microbatches add up to those of the minibatch exactly.
"""

import torch
from torch import Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """PPO's clipped policy objective, negated so that it is a loss.

    With ``r = exp(log_ratio)`` and ``ε = clip_coef``::

        L = -min(r · A, clip(r, 1 - ε, 1 + ε) · A)

    The minimum makes it a pessimistic bound: moving the ratio beyond the clip range earns nothing, and
    having moved it the wrong way always costs.

    Source: Schulman et al. 2017, eq. 7, arXiv 1707.06347.

    Args:
        log_ratio: ``[B]``, ``log π_new(a|s) - log π_old(a|s)``; gradients flow through it.
        advantages: ``[B]``, constants.
        clip_coef: ε > 0.

    Returns:
        ``[B]`` losses.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_coef, 1.0 + clip_coef)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages)


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_coef: float | None = None
) -> Tensor:
    """Squared error of the value estimates, optionally clipped around the old ones.

    ::

        plain    L = ½ (V - R)²
        clipped  L = max(½ (V - R)², ½ (V_clip - R)²),  V_clip = V_old + clip(V - V_old, -ε, ε)

    Source: Schulman et al. 2017, eq. 9, arXiv 1707.06347; the clipped form is that of OpenAI Baselines,
    described as detail 9 of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
    Optimization" (ICLR Blog Track).

    Args:
        values: ``[B]``, the value estimates being trained; gradients flow through them.
        returns: ``[B]`` targets R, constants.
        old_values: ``[B]`` estimates from when the rollout was collected, constants. Needed to clip.
        clip_coef: ε > 0 in the units of the returns, or None for the plain form.

    Returns:
        ``[B]`` losses.
    """
    error = (values - returns).square()
    if clip_coef is None:
        return 0.5 * error
    assert old_values is not None, "the clipped value loss needs old_values"
    clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.maximum(error, (clipped_values - returns).square())
