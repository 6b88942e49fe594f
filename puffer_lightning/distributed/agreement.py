"""Whether the ranks agree: on their options before training, on their weights at any time."""

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from puffer_lightning.distributed.collectives import gather, world_size
from puffer_lightning.errors import ConfigurationError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_options(options: Mapping[str, object]) -> None:
    """Refuse ranks that were started with different options.

    The ranks compare hashes; the options themselves travel only where those differ.

    Args:
        options: By name, nested at will; values that JSON does not know are compared by their ``repr``.

    Raises:
        ConfigurationError: On every rank; it names the options that differ, with their values.
    """
    here = dict(flatten_options(options))
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    of_ranks = gather(here)
    differing = []
    for name in sorted(set().union(*of_ranks)):
        values = [of_rank.get(name, "not given") for of_rank in of_ranks]
        if other := next((r for r, value in enumerate(values) if value != values[0]), 0):
            differing.append(f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}")
    raise ConfigurationError(
        f"The ranks were started with different options: {', '.join(differing)}; "
        "start all of them with the same command and configuration."
    )


def check_same_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if a tensor is not the same on all ranks, bit for bit.

    What travels is a checksum of each, in one reduction. Tensors that are sharded over ranks are left out.

    Args:
        tensors: By name, the same names and shapes on every rank.

    Raises:
        RuntimeError: On every rank; it names the tensors that differ.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    if world_size() == 1 or not tensors:
        return
    checksums = torch.stack([_checksum(tensor) for tensor in tensors.values()])
    # The complement turns the order round, so one maximum finds the largest and the smallest.
    extremes = torch.stack((checksums, ~checksums))
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    differs = (extremes[0] != ~extremes[1]).tolist()
    if any(differs):
        names = ", ".join(name for name, different in zip(tensors, differs, strict=True) if different)
        raise RuntimeError(
            f"The ranks have drifted apart: {names} not the same on all of them, so something must have been "
            "loaded or changed on one rank alone."
        )


def flatten_options(options: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Options nested at will by their dotted names, as JSON; what that does not know, by its ``repr``.

    Args:
        options: By name.
        prefix: Of all names.
    """
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, default=repr, sort_keys=True)


def _checksum(tensor: Tensor) -> Tensor:
    """Scalar int64 of the tensor's bits and their places."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()]).long()
    places = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    return (bits * places).sum()
