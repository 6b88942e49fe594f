"""Episode statistics over all ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class EpisodeStatistics(nn.Module):
    """Returns and lengths of this rank's last episodes, and how many there were.

    A rollout ends a handful of episodes, none, or a burst of short ones, so its own mean jumps; that of the
    last ``window`` episodes of each rank is what is worth plotting and choosing checkpoints by.

    Args:
        window: Episodes of each rank to average over.
    """

    recent: Tensor
    episodes: Tensor

    def __init__(self, window: int = 100) -> None:
        super().__init__()
        self.register_buffer("recent", torch.full((2, window), torch.nan, dtype=torch.float64))
        self.register_buffer("episodes", torch.zeros((), dtype=torch.int64))

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

    def sums(self) -> Tensor:
        """Sum of returns, sum of lengths and number of the recent episodes, and all episodes so far.

        Returns:
            [4] float64. Add these over ranks.
        """
        known = (~self.recent[0].isnan()).sum()
        return torch.stack((*self.recent.nansum(dim=1), known, self.episodes))


def deal_statistics(
    of_ranks: Sequence[Mapping[str, Mapping[str, Tensor]]], rank: int, ranks: int
) -> dict[str, dict[str, Tensor]]:
    """Deal the statistics of some ranks out to another number of ranks.

    Args:
        of_ranks: For each rank that left some, ``EpisodeStatistics.state_dict`` by type of agent.
        rank: Whose share is returned.
        ranks: How many there are to share.

    Returns:
        By type, a share of the episodes: the newest ones, as far as can be told.
    """
    shares = {}
    for name in sorted(set().union(*of_ranks)):
        left = [of[name] for of in of_ranks if name in of]
        recent = torch.stack([state["recent"] for state in left], dim=-1).flatten(1)
        newest_first = recent[:, ~recent[0].isnan()].flip(1)[:, rank::ranks]
        share = torch.full_like(left[0]["recent"], torch.nan)
        kept = min(newest_first.shape[1], share.shape[1])
        share[:, share.shape[1] - kept :] = newest_first[:, :kept].flip(1)
        episodes = sum(int(state["episodes"]) for state in left)
        shares[name] = {
            "recent": share,
            "episodes": torch.tensor(episodes // ranks + (rank < episodes % ranks)),
        }
    return shares


def episode_means(sums: Tensor) -> dict[str, Tensor]:
    """Mean ``episode_return`` and ``episode_length``, NaN before the first; ``episodes`` so far.

    Args:
        sums: [4], ``EpisodeStatistics.sums`` added up over ranks.
    """
    returns, lengths, known, episodes = sums.unbind()
    return {"episode_return": returns / known, "episode_length": lengths / known, "episodes": episodes}
