"""Parameters divided among ranks: in shards (FSDP2), and by rows and columns (tensor parallelism)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

Split = Literal["outputs", "inputs"]
"""Which of a linear layer's features are divided among ranks."""


@dataclass
class Sharding:
    """How parameters are sharded.

    Attributes:
        mixed_precision: Gather parameters in bfloat16 and compute in it; gradients are reduced in float32.
        cpu_offload: Keep shards, and with them the optimizer's state, in host memory.
        reshard_after_forward: Free a block's gathered parameters until its backward pass.
        activation_checkpointing: Keep only what goes into a block, and compute the rest of it again in the
            backward pass.
        unshard_for_rollout: Gather all parameters once for a rollout, instead of in each forward pass.
    """

    mixed_precision: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    unshard_for_rollout: bool = True


def shard(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shard a module's parameters over ranks, in place (Zhao et al. 2023, arXiv:2304.11277, as FSDP2).

    Each block is gathered when it computes; what is in no block, all together when the module does.

    Args:
        module: The same on all ranks. Nothing may use its parameters but its own ``forward``.
        blocks: Modules within it.
        mesh: The ranks to shard over, of one dimension.
        sharding: How.
    """
    offload = OffloadPolicy()
    if sharding.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = MixedPrecisionPolicy()
    if sharding.mixed_precision:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A block is given what the module has computed, in the dtype that it has chosen.
    within = replace(precision, cast_forward_inputs=False)
    for block in blocks:
        if sharding.activation_checkpointing:
            checkpoint(block)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=within,
            offload_policy=offload,
        )
    # It would be gathered again at once.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be divided among ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(module: nn.Module, sharding: Sharding) -> Iterator[None]:
    """Gather a sharded module's parameters once, for many forward passes without gradients.

    Ranks may then call it a different number of times. The parameters must not change within.

    Args:
        module: As ``shard`` left it; any other is gathered already.
        sharding: As given to ``shard``.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        for part in sharded:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in sharded:
            part.reshard()
            part.set_reshard_after_forward(
                sharding.reshard_after_forward and part is not module, recurse=False
            )


def split_layers(module: nn.Module, layers: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Divide linear layers among ranks that are given the same inputs, in place.

    A layer divided by its outputs hands a part of them to one that is divided by its inputs, and only the
    results of that one are summed over ranks.

    Source: Shoeybi et al. 2019, section 3, arXiv:1909.08053.

    Args:
        module: The same on all ranks.
        layers: By name, where ``*`` stands for any one part of it.
        mesh: The ranks, of one dimension.
    """
    styles: dict[Split, ParallelStyle] = {"outputs": ColwiseParallel(), "inputs": RowwiseParallel()}
    parallelize_module(module, mesh, {name: styles[split] for name, split in layers.items()})
