"""Gradients that DDP sends in fewer bytes."""

from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

CommHook = Literal["none", "fp16", "bf16", "powersgd"]

# Of the approximation of each gradient matrix, and minibatches before it begins: the first gradients are the
# largest, and DDP must have settled its buckets.
_POWERSGD_RANK = 4
_POWERSGD_START = 10


class Compression:
    """Compresses the gradients of a model that DDP wraps, and counts what that saves.

    ``fp16`` and ``bf16`` halve them. ``powersgd`` approximates each gradient matrix by one of rank 4 and
    carries what that leaves out over to the next minibatch, from the eleventh minibatch on.

    Source: Vogels et al. 2019, algorithms 1 and 2, arXiv 1905.13727.

    Args:
        comm_hook: How; not "none".

    Attributes:
        bytes_before: Gradient bytes that each rank would have sent so far.
        bytes_sent: Gradient bytes that it did send.
    """

    def __init__(self, comm_hook: CommHook) -> None:
        self.comm_hook = comm_hook
        self.bytes_before = self.bytes_sent = 0

    def register(self, model: DistributedDataParallel) -> None:
        """Compress the gradients of ``model`` from now on, on whichever device it is."""
        # Under torch's own name DDP would refuse the bfloat16 hook without a GPU, where gloo serves it.
        if self.comm_hook == "powersgd":
            state = PowerSGDState(None, _POWERSGD_RANK, _POWERSGD_START)
            model.register_comm_hook(state, self._powersgd)
        else:
            model.register_comm_hook(None, self._half)

    def __str__(self) -> str:
        saved = 1 - self.bytes_sent / max(self.bytes_before, 1)
        return (
            f"comm_hook {self.comm_hook}: each rank sent {self.bytes_sent:,} bytes of gradients instead of "
            f"{self.bytes_before:,}, {saved:.0%} less."
        )

    def _half(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes_before += bucket.buffer().nbytes
        self.bytes_sent += bucket.buffer().numel() * 2
        hook = fp16_compress_hook if self.comm_hook == "fp16" else bf16_compress_hook
        assert group.WORLD is not None
        return hook(group.WORLD, bucket)

    def _powersgd(self, state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        size, element = bucket.buffer().nbytes, bucket.buffer().element_size()
        began = state.iter >= state.start_powerSGD_iter
        sent = state.total_numel_after_compression
        reduced = powerSGD_hook(state, bucket)
        self.bytes_before += size
        self.bytes_sent += (state.total_numel_after_compression - sent) * element if began else size
        return reduced
