"""Who acts next, where environments do not step together."""

import numpy as np
from numpy.typing import NDArray


class Turns:
    """Deals the T · N steps of a rollout out in batches of B environments, whoever is ready when.

    Environments may run ahead of others, but only as far as the steps that are left still divide into batches
    of B different environments. That is so as long as no environment has more of them left than there are
    batches (McNaughton 1959, doi 10.1287/mnsc.6.1.1, with environments as jobs and places in a batch as
    machines). So every batch is full, and the last one ends the rollout.

    Args:
        horizon: T.
        num_envs: N, a multiple of B.
        batch_size: B.
    """

    def __init__(self, horizon: int, num_envs: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._left = np.full(num_envs, horizon)
        self._idle = np.ones(num_envs, dtype=np.bool_)

    @property
    def over(self) -> bool:
        """Whether all steps were dealt out, and done."""
        return bool(self._idle.all()) and not self._left.any()

    def take(self) -> NDArray[np.intp] | None:
        """The environments that act now, [B] ascending; ``None`` if others have to be done first.

        Those that have most left go first; of equal ones, the first.
        """
        ready = np.flatnonzero(self._idle & (self._left > 0))
        if len(ready) < self._batch_size:
            return None
        order = np.argsort(-self._left[ready], kind="stable")
        env_ids = np.sort(ready[order[: self._batch_size]])
        left = self._left.copy()
        left[env_ids] -= 1
        if left.max() * self._batch_size > left.sum():
            return None
        self._left = left
        self._idle[env_ids] = False
        return env_ids

    def done(self, env_ids: NDArray[np.intp]) -> None:
        """Take note of environments that have stepped."""
        self._idle[env_ids] = True
