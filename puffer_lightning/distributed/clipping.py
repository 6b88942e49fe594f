"""Gradients clipped by their global norm, however they are laid out over ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a global norm, over all of their shards.

    Shards are summed in one reduction over all ranks, so that not even rounding differs between them. Ranks
    that share a policy's layers would drift apart.

    Args:
        parameters: All sharded, in whatever ways, or none.
        max_norm: The norm.

    Returns:
        The norm they had, a scalar.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    if not gradients:
        return clip_grad_norm_(parameters, max_norm)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient), []).append(gradient.to_local())
    squares = sum(get_total_norm(local).float().square() / copies for copies, local in by_copies.items())
    assert isinstance(squares, Tensor)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in by_copies.values():
        torch._foreach_mul_(local, coefficient)
    return norm


def _copies(gradient: DTensor) -> int:
    """The number of ranks that hold the same shard."""
    mesh = gradient.device_mesh
    split = [mesh.size(i) for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return dist.get_world_size() // math.prod(split)
