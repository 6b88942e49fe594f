"""A rollout as transitions or as sequences of them, and the order in which an update visits these."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.rollout.rollout import Rollout

# A CPU has more transitions than these computed part by part: with 128 features they are 2 MiB a layer. Two
# minibatches of 32768 take two thirds of the time they take whole.
CACHED_ROWS = 4096


class Batch(NamedTuple):
    """Transitions [B, ...]: a whole rollout, a minibatch or a microbatch of one.

    For a policy with memory they are sequences of a rollout's length instead: [T, B, ...].

    Attributes:
        observations: Pytree of tensors [B, ...].
        actions: Tensor [B, ...] or a pytree of them.
        log_probs: [B] when the actions were sampled.
        values: [B] when the actions were sampled.
        advantages: [B], not normalised.
        returns: [B], the value function's targets.
        valid: [B] bool, see :class:`Rollout`.
        state: Pytree of tensors [B, ...], the policy's state before the first step of each sequence; ``()``
            for transitions.
        started: [T, B] bool, see :class:`Rollout`; ``None`` for transitions.
    """

    observations: Any
    actions: Any
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    valid: Tensor
    state: Any = ()
    started: Tensor | None = None

    @property
    def size(self) -> int:
        """B, transitions or sequences."""
        return self.valid.shape[-1]

    def take(self, indices: Tensor) -> "Batch":
        """The transitions or sequences at ``indices`` [B'], copied into contiguous memory."""
        *steps, state, started = self
        dim = 0 if started is None else 1
        taken = tree_map(lambda leaf: leaf.index_select(dim, indices), steps)
        if started is None:
            return Batch(*taken)
        state = tree_map(lambda leaf: leaf.index_select(0, indices), state)
        return Batch(*taken)._replace(state=state, started=started.index_select(1, indices))


def make_batch(rollout: Rollout, advantages: Tensor) -> Batch:
    """A rollout with its advantages and returns: as sequences if its policy has a state, else flat.

    Args:
        rollout: The rollout.
        advantages: [T, N], of :func:`~puffer_lightning.functional.gae`.
    """
    if not tree_leaves(rollout.state):
        return flatten(rollout, advantages)
    return Batch(*_parts(rollout, advantages))._replace(state=rollout.state, started=rollout.started)


def flatten(rollout: Rollout, advantages: Tensor) -> Batch:
    """Views of a rollout's [T, N, ...] tensors as [T · N, ...], with its advantages and returns.

    Args:
        rollout: The rollout.
        advantages: [T, N], of :func:`~puffer_lightning.functional.gae`.
    """
    return Batch(*tree_map(lambda leaf: leaf.flatten(0, 1), _parts(rollout, advantages)))


def _parts(rollout: Rollout, advantages: Tensor) -> tuple[Any, ...]:
    return (
        rollout.observations,
        rollout.actions,
        rollout.log_probs,
        rollout.values,
        advantages,
        advantages + rollout.values,
        rollout.valid,
    )


def shuffled_indices(size: int, epochs: int, generator: torch.Generator) -> Tensor:
    """A fresh random order of all ``size`` transitions or sequences for each of the update epochs.

    Returns:
        int64 [epochs, size] on the generator's device, each row a permutation.
    """
    return torch.stack(
        [torch.randperm(size, generator=generator, device=generator.device) for _ in range(epochs)]
    )
