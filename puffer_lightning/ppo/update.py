"""One update: epochs, minibatches and microbatches over a rollout."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from puffer_lightning.distributed import clip_grad_norm, global_sum, world_size
from puffer_lightning.functional import (
    explained_variance_from_sums,
    explained_variance_sums,
    gae,
    masked_sums,
    mean_and_std,
)
from puffer_lightning.policies import Policy
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.loss import STATISTICS, minibatch_loss
from puffer_lightning.rollout import Rollout, make_batch, shuffled_indices

LossFunction = Callable[..., tuple[Tensor, Tensor]]


def update(
    policy: Policy,
    optimizer: Optimizer,
    rollout: Rollout,
    config: PPOConfig,
    generator: torch.Generator,
    *,
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
    clip: Callable[[float], Tensor] | None = None,
    loss_function: LossFunction = minibatch_loss,
) -> dict[str, Tensor]:
    """Train the policy on a rollout.

    Everything that depends on the shuffles alone, above all the moments of each minibatch's advantages, is
    computed before the first optimizer step, and reduced over ranks in one go. Nothing is read back from the
    device, unless ``target_kl`` asks for it, once a pass.

    Args:
        policy: The policy, as the strategy set it up.
        optimizer: Its optimizer; anything with ``step`` and ``zero_grad``.
        rollout: What the policy collected.
        config: The coefficients.
        generator: Shuffles the transitions or, of a policy with memory, the sequences; on the rollout's
            device.
        backward: Runs the backward pass of a loss.
        no_sync: Opens a context in which backward passes leave gradients on this rank; entered for all
            microbatches of a minibatch but the last.
        clip: Scales gradients down to a global norm and returns the norm they had.
        loss_function: Stands in for :func:`minibatch_loss`, such as a compiled version of it.

    Returns:
        Scalars on the device, equal on all ranks: ``policy_loss``, ``value_loss``, ``entropy``,
        ``approx_kl``, ``clip_fraction``, ``grad_norm`` (before clipping), each averaged over what was trained
        on, and ``explained_variance`` of the values before the update.
    """
    advantages = gae(
        rollout.rewards,
        rollout.values,
        rollout.next_values,
        rollout.terminated,
        rollout.truncated,
        config.gamma,
        config.gae_lambda,
        valid=rollout.valid,
    )
    batch = make_batch(rollout, advantages)
    explained = explained_variance_sums(batch.values, batch.returns, batch.valid)
    order = shuffled_indices(batch.size, config.update_epochs, generator)
    means, stds, weights = _minibatch_moments(batch.advantages, batch.valid, order, config)
    clip = clip or (lambda norm: clip_grad_norm(policy.parameters(), norm))

    totals = torch.zeros(len(STATISTICS), device=advantages.device, dtype=torch.float32)
    grad_norms = torch.zeros((), device=advantages.device, dtype=torch.float32)
    passes = 0
    for epoch in range(config.update_epochs):
        before = totals.clone()
        for minibatch, indices in enumerate(order[epoch].chunk(config.num_minibatches)):
            optimizer.zero_grad()
            moments = means[epoch, minibatch], stds[epoch, minibatch], weights[epoch, minibatch]
            microbatches = indices.chunk(config.accumulate_grad_batches)
            for number, rows in enumerate(microbatches, start=1):
                with nullcontext() if number == len(microbatches) else no_sync():
                    loss, statistics = loss_function(policy, batch.take(rows), *moments, config)
                    backward(loss)
                totals += statistics
            grad_norms += clip(config.max_grad_norm)
            optimizer.step()
        passes += 1
        if config.target_kl is not None and _moved_too_far(
            totals - before, config.num_minibatches, config.target_kl
        ):
            break

    minibatches = passes * config.num_minibatches
    sums = global_sum(torch.cat((totals.double() / (world_size() * minibatches), explained)))
    totals, explained = sums.tensor_split([len(STATISTICS)])
    metrics = dict(zip(STATISTICS, totals.unbind(), strict=True))
    metrics["grad_norm"] = grad_norms / minibatches
    metrics["explained_variance"] = explained_variance_from_sums(explained)
    return metrics


def _minibatch_moments(
    advantages: Tensor, valid: Tensor, order: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and std of the advantages, and the loss weight, of each minibatch: three [epochs, minibatches]."""
    minibatches = order.view(config.update_epochs, config.num_minibatches, -1)

    def by_minibatch(steps: Tensor) -> Tensor:
        return steps.movedim(-1, 0)[minibatches].flatten(2)

    sums = masked_sums(by_minibatch(advantages), by_minibatch(valid))
    over_ranks = global_sum(sums.clone())
    # Strategies average gradients over ranks; times the ranks, the average becomes the sum over all samples.
    weights = world_size() / over_ranks[..., 0].clamp(min=1.0)
    mean, std = mean_and_std(over_ranks if config.normalize_advantages == "global" else sums)
    if config.normalize_advantages == "none":
        mean, std = torch.zeros_like(mean), torch.ones_like(std)
    return mean.to(advantages.dtype), std.to(advantages.dtype), weights.to(advantages.dtype)


def _moved_too_far(statistics: Tensor, num_minibatches: int, target_kl: float) -> bool:
    """Whether a pass's KL exceeds the target; summed over ranks first, so that all of them stop alike."""
    kl = statistics[STATISTICS.index("approx_kl")] / (num_minibatches * world_size())
    return bool(global_sum(kl) > target_kl)
