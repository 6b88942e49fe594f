"""Stops a run whose numbers are not finite time and again, and says where they were not first."""

import warnings
from dataclasses import fields
from typing import Any

from torch import Tensor

from puffer_lightning.distributed import gather, rank, world_size
from puffer_lightning.policies import Policy
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.non_finite import first_non_finite
from puffer_lightning.rollout import Rollout


class NonFiniteError(RuntimeError):
    """Training does not go on, because numbers are not finite time and again.

    Attributes:
        batch: The last rollout, by the names of :class:`~puffer_lightning.rollout.Rollout`, and the
            ``place``, for ``torch.load`` with ``weights_only``; None on ranks that are not to blame.
    """

    def __init__(self, message: str, batch: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.batch = batch


class Sentinel:
    """Counts iterations whose update skipped minibatches, and says what did it."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def check(
        self, skipped: int, policy: Policy, rollout: Rollout, scaled: Rollout, config: PPOConfig
    ) -> None:
        """Warn if minibatches were skipped; costs nothing if not.

        Args:
            skipped: How many, the same on all ranks.
            policy: The policy as it is now.
            rollout: What it collected.
            scaled: The same with the rewards that it was trained on.
            config: The coefficients.

        Raises:
            NonFiniteError: It is the last of ``max_skipped_updates`` iterations in a row; on all ranks alike.
        """
        if not skipped:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        # In the order of cause and effect, so the least is the first.
        _, of_rank, place = min(
            (stage, number, text)
            for number, (stage, text) in gather((rank(), first_non_finite(policy, rollout, scaled, config)))
        )
        if world_size() > 1:
            place = f"rank {of_rank}: {place}"
        if self._in_a_row >= config.max_skipped_updates:
            raise NonFiniteError(
                f"The updates of {self._in_a_row} iterations in a row, max_skipped_updates, had to skip "
                f"minibatches that were not finite, in the last of them first for {place}",
                {"place": place, **_plain(rollout)} if rank() == of_rank else None,
            )
        if rank() == 0:
            warnings.warn(
                f"{skipped} minibatches were skipped, as their loss or gradients were not finite, first for "
                f"{place}.",
                stacklevel=3,
            )


def _plain(value: Any) -> Any:
    """A rollout or part of it in types that ``weights_only`` lets pass."""
    if isinstance(value, Rollout):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.detach().cpu() if isinstance(value, Tensor) else value
