"""Returns and lengths of the episodes that end within a rollout."""

import torch
from torch import Tensor


def finished_episodes(
    rewards: Tensor, valid: Tensor, done: Tensor, carry: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Episode returns and lengths, from running sums over the whole rollout rather than step by step.

    With C_t the running sum of rewards (and of steps) since the rollout began, an episode that ends at t
    and follows one that ended at s has return C_t − C_s; the first of a rollout adds what ``carry``
    brought along.

    Args:
        rewards: [T, N].
        valid: [T, N] bool, False on reset steps, which belong to no episode.
        done: [T, N] bool, the episode ended at this step.
        carry: [2, N] float64, return and length so far of the episodes under way before the first step.

    Returns:
        ``(returns [K], lengths [K], carry [2, N])``: the K finished episodes in order of time, in float64,
        and the sums of the episodes now under way.
    """
    steps = torch.stack((rewards, torch.ones_like(rewards))).double().where(valid, 0.0)
    running = carry.unsqueeze(1) + steps.cumsum(dim=1)
    times = torch.arange(1, done.shape[0] + 1, device=done.device).unsqueeze(1)
    ended_by = torch.where(done, times, 0).cummax(dim=0).values
    ended_before = torch.cat((torch.zeros_like(ended_by[:1]), ended_by[:-1]))
    since = torch.cat((torch.zeros_like(carry).unsqueeze(1), running), dim=1)
    episodes = running - since.gather(1, ended_before.expand_as(running))
    under_way = running[:, -1] - since.gather(1, ended_by[-1:].expand(2, 1, -1)).squeeze(1)
    returns, lengths = episodes[:, done]
    return returns, lengths, under_way
