"""The only room that imports ``torch.distributed``: reductions, gradient-sync contexts and seeds per rank."""

from puffer_lightning.distributed.collectives import global_sum, local_world_size, rank, world_size
from puffer_lightning.distributed.gradient_sync import no_sync
from puffer_lightning.distributed.seeding import derive_seed

__all__ = ["derive_seed", "global_sum", "local_world_size", "no_sync", "rank", "world_size"]
