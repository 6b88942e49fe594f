"""Coming together again after torchrun has restarted all ranks."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]


def rejoin(backend: str, timeout: timedelta) -> None:
    """Form the process group of ranks that torchrun has restarted; does nothing to others.

    Where torchrun itself keeps what ranks share, it does so across restarts: torch would look for the ranks
    at the addresses of those that are gone. So each attempt gets its own names.

    Args:
        backend: gloo, nccl, ...
        timeout: How long ranks wait for one another.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    world_size = int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt/{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timeout,
    )
