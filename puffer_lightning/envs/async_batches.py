"""How vector environments step a part of their environments while the policy acts on others."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Received(NamedTuple):
    """What B of the environments returned, from :meth:`SupportsSendRecv.recv`.

    Attributes:
        env_ids: [B] int, which ones; row i of all else is of environment ``env_ids[i]``.
        observations: Pytree of arrays [B, ...].
        rewards: [B] float.
        terminated: [B] bool.
        truncated: [B] bool.
        infos: As of a vector environment of B environments.
    """

    env_ids: NDArray[np.intp]
    observations: Any
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: dict[str, Any]


class SupportsSendRecv(Protocol):
    """What a ``VectorEnv`` needs besides, to be stepped in batches (``overlap`` of the data module).

    ``reset`` is as ever: of all environments, whose observations it returns in order. If the autoreset mode
    is DISABLED, one with a ``reset_mask`` leaves alone what was sent to other environments.

    Attributes:
        batch_size: B, how many environments ``recv`` returns; N is a multiple of it.
    """

    batch_size: int

    def send(self, actions: Any, env_ids: NDArray[Any] | Sequence[int]) -> None:
        """Let environments step, none of which was sent actions that were not received yet.

        Args:
            actions: Pytree of arrays [B, ...], in the order of ``env_ids``.
            env_ids: [B], which environments.
        """

    def recv(self, env_ids: NDArray[Any] | None = None) -> Received:
        """Wait for environments that were sent actions; what is returned is read before they are again.

        Args:
            env_ids: Which ones to wait for, as they were sent; the first ``batch_size`` that are ready, if
                not given. Where that cannot be chosen, leave the argument out: then environments may be
                stepped with ``overlap="first_ready"``, but not with ``"halves"``.
        """
