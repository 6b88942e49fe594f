"""Seeds that differ where they must (rank, purpose) and repeat where they must (same run seed)."""

import zlib

import numpy as np
import torch
from torch import Tensor

from puffer_lightning.distributed.collectives import broadcast


def derive_seed(seed: int, purpose: str, rank: int = 0) -> int:
    """A seed for one purpose on one rank, statistically independent of every other.

    Lightning seeds all ranks alike, so whatever must differ between ranks (action sampling, minibatch
    shuffling) takes its generator's seed from here.

    Args:
        seed: The run's seed, any size of non-negative integer.
        purpose: What the random numbers are for, such as ``"actions"``.
        rank: The data-parallel rank.

    Returns:
        An integer in [0, 2³¹).
    """
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), rank])
    return int(sequence.generate_state(1)[0] >> 1)


def set_generator(generator: torch.Generator, state: Tensor) -> None:
    """Give a generator a saved state; it stays as it is if that is from another kind of device."""
    if state.numel() == generator.get_state().numel():
        generator.set_state(state.cpu())


def share_seed() -> None:
    """Give all ranks rank 0's seed, where they were seeded apart or not at all."""
    seed = broadcast(torch.initial_seed())
    if seed != torch.initial_seed():
        torch.manual_seed(seed)
