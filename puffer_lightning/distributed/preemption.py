"""Slow ranks stop collecting once enough others have finished."""

import math
import secrets

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from puffer_lightning.distributed.collectives import broadcast, rank, world_size


class Preemption:
    """Counts the ranks that have finished their rollouts, for those that have not.

    The count is kept in the process group's store, where it is read in microseconds and without waiting for
    anyone; a collective would make each rank wait for the slowest, which is what this is to avoid.

    Source: Wijmans et al. 2020, "DD-PPO", section 3 (arXiv 1911.00357).

    Args:
        share: Share of the ranks that have to have finished, in (0, 1].
    """

    def __init__(self, share: float) -> None:
        self._enough = math.ceil(share * world_size())
        # Not the counts of an earlier run in the same processes.
        self._store = PrefixStore(f"preemption/{broadcast(secrets.token_hex(8))}", _get_default_store())
        self._rollout = 0

    def begin(self) -> None:
        """Begin a rollout; none of the ranks has finished it."""
        if rank() == 0 and self._rollout:
            self._store.delete_key(str(self._rollout))
        self._rollout += 1

    def finish(self) -> None:
        """Say that this rank has finished the rollout."""
        self._store.add(str(self._rollout), 1)

    def due(self) -> bool:
        """Whether enough ranks have finished the rollout."""
        return self._store.add(str(self._rollout), 0) >= self._enough
