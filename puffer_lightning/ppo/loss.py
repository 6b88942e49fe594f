"""The loss of one microbatch."""

import torch
from torch import Tensor

from puffer_lightning.functional import (
    approx_kl,
    clip_fraction,
    clipped_surrogate,
    standardize,
    value_loss,
)
from puffer_lightning.policies import Policy
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.rollout import Batch

STATISTICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def minibatch_loss(
    policy: Policy, batch: Batch, mean: Tensor, std: Tensor, weight: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """PPO's loss, summed over a microbatch so that the microbatches of a minibatch add up.

    ::

        L = Σ_b weight · valid_b · (surrogate_b + vf_coef · value_b − ent_coef · entropy_b)

    Source: Schulman et al. 2017, eq. 9, arXiv 1707.06347.

    Args:
        policy: The policy under training.
        batch: B transitions, or sequences of them.
        mean: Scalar, of the advantages of the whole minibatch.
        std: Scalar, likewise.
        weight: Scalar: 1 over the number of valid transitions in the minibatch, times what the strategy's
            averaging over ranks divides by.
        config: The coefficients.

    Returns:
        The loss, a scalar, and the weighted sums [5] of ``STATISTICS``, without gradient.
    """
    log_probs, entropies, values = policy.evaluate(
        batch.observations, batch.actions, batch.state, batch.started
    )
    # Here, and not only in the sums below: the gradient of an infinite or NaN ratio times 0 would be NaN.
    log_ratio = (log_probs - batch.log_probs).where(batch.valid, 0.0)
    surrogate = clipped_surrogate(log_ratio, standardize(batch.advantages, mean, std), config.clip_coef)
    value_errors = value_loss(
        values, batch.returns, batch.values, config.clip_coef if config.clip_value_loss else None
    )
    losses = surrogate + config.vf_coef * value_errors - config.ent_coef * entropies
    # Selected rather than multiplied by 0: nothing an invalid row holds, not even NaN, may count.
    total = losses.where(batch.valid, 0.0).sum()
    # Gradients can be finite where their loss is not. The weight is then NaN and they are, on all ranks.
    loss = total * (weight + 0.0 * total.detach())
    with torch.no_grad():
        kl, clipped = approx_kl(log_ratio), clip_fraction(log_ratio, config.clip_coef)
        terms = torch.stack((surrogate, value_errors, entropies, kl, clipped))
        statistics = terms.where(batch.valid, 0.0).flatten(1).sum(-1) * weight
    return loss, statistics
