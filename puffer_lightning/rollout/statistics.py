"""Episode statistics over all ranks."""

import torch
from torch import Tensor
from torchmetrics import Metric

from puffer_lightning.distributed import data_parallel


class EpisodeStatistics(Metric):
    """Mean return and length of the last episodes, and how many there were; reduced over ranks.

    A rollout ends a handful of episodes, none, or a burst of short ones, so its own mean jumps; that of the
    last ``window`` episodes of each rank is what is worth plotting and choosing checkpoints by.

    Args:
        window: Episodes of each rank to average over.
    """

    full_state_update = False
    recent: Tensor
    episodes: Tensor

    def __init__(self, window: int = 100) -> None:
        super().__init__(process_group=data_parallel())
        self.add_state(
            "recent", torch.full((2, window), torch.nan, dtype=torch.float64), dist_reduce_fx=_concatenate
        )
        self.add_state("episodes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.persistent(True)

    def update(self, returns: Tensor, lengths: Tensor) -> None:
        """Count episodes.

        Args:
            returns: [K] undiscounted returns.
            lengths: [K] environment steps.
        """
        if returns.numel():
            ended = torch.stack((returns, lengths)).to(self.recent)
            self.recent = torch.cat((self.recent, ended), dim=1)[:, -self.recent.shape[1] :]
            self.episodes = self.episodes + returns.numel()

    def compute(self) -> dict[str, Tensor]:
        """Mean ``episode_return`` and ``episode_length``, NaN before the first; ``episodes`` so far."""
        episode_return, episode_length = self.recent.nanmean(dim=1)
        return {
            "episode_return": episode_return,
            "episode_length": episode_length,
            "episodes": self.episodes,
        }


def _concatenate(recent: Tensor) -> Tensor:
    """Windows [ranks, 2, window] side by side; the entries still empty are NaN and do not count."""
    return recent.transpose(0, 1).flatten(1)
