"""A rollout as flat transitions, and the order in which an update visits them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from puffer_lightning.rollout.rollout import Rollout


class Batch(NamedTuple):
    """Transitions [B, ...]: a whole rollout, a minibatch or a microbatch of one.

    Attributes:
        observations: Pytree of tensors [B, ...].
        actions: Tensor [B, ...] or a pytree of them.
        log_probs: [B] when the actions were sampled.
        values: [B] when the actions were sampled.
        advantages: [B], not normalised.
        returns: [B], the value function's targets.
        valid: [B] bool, see :class:`Rollout`.
    """

    observations: Any
    actions: Any
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    valid: Tensor

    def take(self, indices: Tensor) -> "Batch":
        """The transitions at ``indices`` [B'], copied into contiguous memory."""
        return Batch(*tree_map(lambda leaf: leaf.index_select(0, indices), tuple(self)))


def flatten(rollout: Rollout, advantages: Tensor) -> Batch:
    """Views of a rollout's [T, N, ...] tensors as [T · N, ...], with its advantages and returns.

    Args:
        rollout: The rollout.
        advantages: [T, N], of :func:`~puffer_lightning.functional.gae`.
    """
    returns = advantages + rollout.values
    parts = (
        rollout.observations,
        rollout.actions,
        rollout.log_probs,
        rollout.values,
        advantages,
        returns,
        rollout.valid,
    )
    return Batch(*tree_map(lambda leaf: leaf.flatten(0, 1), parts))


def shuffled_indices(size: int, epochs: int, generator: torch.Generator) -> Tensor:
    """A fresh random order of all ``size`` transitions for each of the update epochs.

    Returns:
        int64 [epochs, size] on the generator's device, each row a permutation.
    """
    return torch.stack(
        [torch.randperm(size, generator=generator, device=generator.device) for _ in range(epochs)]
    )
