"""What an update did: numbers to watch, computed on the device without waiting for it."""

import torch
from torch import Tensor

from puffer_lightning.functional.normalization import masked_sums

# Sums of squares in float64 cannot tell a relative variance below about this from none at all, and neither
# can float32 returns, whose neighbours differ by 1e-7 of their size.
_NO_VARIANCE = 1e-13


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(π_old ‖ π_new) from samples of π_old: ``(r - 1) - log r``, with ``r = π_new / π_old``.

    Unbiased like ``-log r``, but never negative and of lower variance.

    Source: the k3 estimator of Schulman 2020, "Approximating KL Divergence"
    (http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratio: ``[B]``, ``log π_new(a|s) - log π_old(a|s)``.

    Returns:
        ``[B]`` estimates in nats; their mean estimates the divergence.
    """
    # expm1 keeps the digits that exp(x) - 1 loses at the small ratios of a healthy update.
    return torch.expm1(log_ratio) - log_ratio


def clip_fraction(log_ratio: Tensor, clip_coef: float) -> Tensor:
    """Whether each sample's ratio lies outside the clip range, ``|r - 1| > ε``.

    Args:
        log_ratio: ``[B]``, ``log π_new(a|s) - log π_old(a|s)``.
        clip_coef: ε > 0.

    Returns:
        ``[B]`` of 0 and 1 in the dtype of ``log_ratio``; their mean is the fraction.
    """
    return (torch.expm1(log_ratio).abs() > clip_coef).to(log_ratio.dtype)


def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The sums that `explained_variance_from_sums` needs; add them over microbatches and ranks.

    Args:
        values: Value estimates V, any shape.
        returns: Returns R, the same shape.
        mask: bool, the same shape, True where the entry is valid.

    Returns:
        ``[5]`` float64: count, ΣR, ΣR², Σ(R - V), Σ(R - V)² over the valid entries.
    """
    flat_returns, flat_mask = returns.reshape(-1).double(), mask.reshape(-1)
    of_returns = masked_sums(flat_returns, flat_mask)
    of_errors = masked_sums(flat_returns - values.reshape(-1), flat_mask)
    return torch.cat([of_returns, of_errors[1:]])


def explained_variance_from_sums(sums: Tensor) -> Tensor:
    """``1 - Var[R - V] / Var[R]``: 1 for perfect values, 0 for a constant, below 0 for worse than that.

    Where the returns do not vary (or nothing is valid) there is nothing to explain and the result is 0,
    never NaN, so that it can be logged and averaged.

    Args:
        sums: ``[5]`` from `explained_variance_sums`, or a sum of such.

    Returns:
        Scalar, float64.
    """
    count, returns, returns_squared, errors, errors_squared = sums.unbind(-1)
    count = count.clamp(min=1.0)
    mean_square = returns_squared / count
    variance = mean_square - (returns / count).square()
    error_variance = (errors_squared / count - (errors / count).square()).clamp(min=0.0)
    varies = variance > _NO_VARIANCE * mean_square
    return torch.where(varies, 1.0 - error_variance / variance.where(varies, 1.0), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the returns' variance that the values explain, over the valid entries.

    See `explained_variance_from_sums` for the formula and for returns without variance.

    Args:
        values: Value estimates V, any shape.
        returns: Returns R, the same shape.
        mask: bool, the same shape, True where the entry is valid.

    Returns:
        Scalar, float64.
    """
    return explained_variance_from_sums(explained_variance_sums(values, returns, mask))
