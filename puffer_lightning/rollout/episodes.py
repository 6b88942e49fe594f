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
    # By environment, and then by time, so that what ended before an episode is next to it.
    envs, times = done.t().nonzero(as_tuple=True)
    at_end = running[:, times, envs]
    first = torch.ones_like(envs, dtype=torch.bool)
    first[1:] = envs[1:] != envs[:-1]
    episodes = at_end - at_end.roll(1, dims=1).masked_fill(first, 0.0)
    last = first.roll(-1)
    under_way = running[:, -1].clone()
    under_way[:, envs[last]] -= at_end[:, last]
    returns, lengths = episodes[:, (times * done.shape[1] + envs).argsort()]
    return returns, lengths, under_way
