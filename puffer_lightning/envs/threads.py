"""How many threads step the environments of packages that bring their own."""

from puffer_lightning.distributed import local_world_size
from puffer_lightning.envs.shared_memory.arguments import processors


def default_threads(num_envs: int) -> int:
    """This rank's share of the processors, at least 1 and at most one an environment.

    Args:
        num_envs: N, on this rank.
    """
    return max(1, min(processors() // local_world_size(), num_envs))
