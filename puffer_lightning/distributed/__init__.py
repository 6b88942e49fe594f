"""The only room that imports ``torch.distributed``: what ranks send each other, agree on and differ in."""

from puffer_lightning.distributed.agreement import check_same_options, check_same_tensors
from puffer_lightning.distributed.collectives import (
    broadcast,
    gather,
    global_sum,
    local_world_size,
    rank,
    world_size,
)
from puffer_lightning.distributed.compression import CommHook, Compression
from puffer_lightning.distributed.gradient_sync import no_sync
from puffer_lightning.distributed.preemption import Preemption
from puffer_lightning.distributed.seeding import derive_seed, share_seed

__all__ = [
    "CommHook",
    "Compression",
    "Preemption",
    "broadcast",
    "check_same_options",
    "check_same_tensors",
    "derive_seed",
    "gather",
    "global_sum",
    "local_world_size",
    "no_sync",
    "rank",
    "share_seed",
    "world_size",
]
