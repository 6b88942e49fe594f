"""Mean and standard deviation from sums, so that they hold over microbatches and ranks.

The mean of means is not the mean, and the standard deviation of a part is not that of the whole; sums add.
``masked_sums`` of each part, added up, gives through ``mean_and_std`` the moments of the whole.
"""

import torch
from torch import Tensor


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of the valid entries along the last dimension.

    Args:
        x: ``[..., B]``. Invalid entries are not read, so they may be anything, even NaN.
        mask: ``[..., B]`` bool, True where the entry is valid.

    Returns:
        ``[..., 3]`` float64: in float32 the difference of the two sums would lose a small spread around a
        large mean. Add these over microbatches and ranks.
    """
    valid = x.double().masked_fill(~mask, 0.0)
    return torch.stack([mask.sum(-1).double(), valid.sum(-1), valid.square().sum(-1)], dim=-1)


def mean_and_std(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation (divisor ``n - 1``, as ``torch.std``) from sums.

    ::

        mean = Σx / n,  std = sqrt(max(Σx² - (Σx)² / n, 0) / (n - 1))

    Neither is ever NaN: the mean of nothing is 0, and where ``n <= 1`` leaves the spread undefined, std is
    1, so that standardising such a sample only centres it.

    Args:
        sums: ``[..., 3]`` from `masked_sums`, or a sum of such.

    Returns:
        ``mean [...]`` and ``std [...]``, float64.
    """
    count, total, squares = sums.unbind(-1)
    mean = total / count.clamp(min=1.0)
    # Rounding can leave the sum of squared deviations a little below zero.
    deviations = (squares - total * mean).clamp(min=0.0)
    std = (deviations / (count - 1.0).clamp(min=1.0)).sqrt()
    return mean, torch.where(count > 1.0, std, 1.0)


def standardize(advantages: Tensor, mean: Tensor, std: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to zero mean and unit spread: ``(A - mean) / (std + eps)``.

    Source: detail 7 of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization"
    (ICLR Blog Track), there over the minibatch.

    Args:
        advantages: ``[..., B]``.
        mean: Broadcastable to ``advantages``; of the whole minibatch, not of one microbatch.
        std: As ``mean``.
        eps: Keeps equal advantages from a division by zero.

    Returns:
        ``[..., B]`` of the dtype of ``advantages``.
    """
    return (advantages - mean.to(advantages.dtype)) / (std.to(advantages.dtype) + eps)
