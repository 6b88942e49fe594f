"""The only room that imports ``torch.distributed``: what ranks send, share, agree on and differ in."""

from torch.distributed.checkpoint.api import CheckpointException

from puffer_lightning.distributed.agreement import check_same_options, check_same_tensors, flatten_options
from puffer_lightning.distributed.broken_off import finish_reduction
from puffer_lightning.distributed.clipping import clip_grad_norm
from puffer_lightning.distributed.collectives import (
    broadcast,
    data_parallel,
    gather,
    gather_rows,
    global_sum,
    local_world_size,
    rank,
    set_data_parallel,
    shares_data,
    world_size,
)
from puffer_lightning.distributed.compression import CommHook, Compression
from puffer_lightning.distributed.exchange import exchange_gradients
from puffer_lightning.distributed.failures import (
    TIMEOUT,
    TORCH_TIMEOUT,
    explanation,
    has_backend,
    is_first_failure,
    let_others_notice,
    lost_connection,
    seconds_waited,
    silent_ranks,
)
from puffer_lightning.distributed.folders import check_folder, finish_folder, folder_defect
from puffer_lightning.distributed.gradient_sync import no_sync
from puffer_lightning.distributed.measuring import COLLECTIVES, Communication, CommunicationMeter
from puffer_lightning.distributed.preemption import Preemption
from puffer_lightning.distributed.restarts import rejoin
from puffer_lightning.distributed.seeding import derive_seed, set_generator, share_seed
from puffer_lightning.distributed.sharding import Sharding, Split, gathered, local_part, shard, split_layers

__all__ = [
    "COLLECTIVES",
    "TIMEOUT",
    "TORCH_TIMEOUT",
    "CheckpointException",
    "CommHook",
    "Communication",
    "CommunicationMeter",
    "Compression",
    "Preemption",
    "Sharding",
    "Split",
    "broadcast",
    "check_folder",
    "check_same_options",
    "check_same_tensors",
    "clip_grad_norm",
    "data_parallel",
    "derive_seed",
    "exchange_gradients",
    "explanation",
    "finish_folder",
    "finish_reduction",
    "flatten_options",
    "folder_defect",
    "gather",
    "gather_rows",
    "gathered",
    "global_sum",
    "has_backend",
    "is_first_failure",
    "let_others_notice",
    "local_part",
    "local_world_size",
    "lost_connection",
    "no_sync",
    "rank",
    "rejoin",
    "seconds_waited",
    "set_data_parallel",
    "set_generator",
    "shard",
    "share_seed",
    "shares_data",
    "silent_ranks",
    "split_layers",
    "world_size",
]
