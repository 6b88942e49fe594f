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
from puffer_lightning.ppo.compiled import CompiledMinibatches
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.gradients import Finish, minibatch_gradients
from puffer_lightning.ppo.loss import STATISTICS, minibatch_loss
from puffer_lightning.ppo.steps import step_if_finite
from puffer_lightning.rollout import Batch, Measure, Rollout, make_batch, shuffled_indices, unmeasured

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
    finish: Finish | None = None,
    clip: Callable[[float], Tensor] | None = None,
    loss_function: LossFunction = minibatch_loss,
    compiled: CompiledMinibatches | None = None,
    measure: Measure = unmeasured,
) -> dict[str, Tensor]:
    """Train the policy on a rollout.

    Everything that depends on the shuffles alone, above all the moments of each minibatch's advantages, is
    computed before the first optimizer step, and reduced over ranks in one go. Nothing is read back from the
    device, unless ``target_kl`` asks for it, once a pass.

    A minibatch whose loss or gradients are not finite is skipped, on all ranks alike, since all have the same
    norm of the reduced gradients. Where memory runs out microbatches become smaller, see
    :func:`~puffer_lightning.ppo.gradients.minibatch_gradients`.

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
        finish: Reduces the gradients of parameters of which a backward pass that ran out of memory has left
            other ranks waiting; None if gradients are not reduced.
        clip: Scales gradients down to a global norm and returns the norm they had.
        loss_function: Stands in for :func:`minibatch_loss`, such as a compiled version of it.
        compiled: Trains on minibatches past all of the above, as far as it can.
        measure: Has the phases of the update measured.

    Returns:
        Scalars on the device, equal on all ranks: ``policy_loss``, ``value_loss``, ``entropy``,
        ``approx_kl``, ``clip_fraction``, ``grad_norm`` (before clipping), each averaged over what was trained
        on, NaN if that is nothing; ``explained_variance`` of the values before the update; and ``skipped``,
        the number of minibatches that were.
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
    moments = _minibatch_moments(batch.advantages, batch.valid, order, config)
    take = measure("update/gather", batch.take)
    loss_function = measure("update/forward", loss_function)
    backward = measure("update/backward", backward)
    clip = measure("update/step", clip or (lambda norm: clip_grad_norm(policy.parameters(), norm)))
    step = measure("update/step", step_if_finite)
    graph = None if compiled is None else compiled.begin(batch, config, optimizer)
    if graph is not None:
        graph = measure("update/backward", graph)

    def train(indices: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Take an optimizer step; a minibatch's sums of ``STATISTICS`` and the norm of its gradients."""
        done = None if graph is None else graph(indices, moments)
        if done is not None:
            return done

        def loss(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
            return loss_function(policy, batch, *moments.unbind(), config)

        optimizer.zero_grad()
        of_minibatch = minibatch_gradients(
            policy, take, indices, loss, config, backward=backward, no_sync=no_sync, finish=finish
        )
        norm = clip(config.max_grad_norm)
        step(optimizer, norm)
        return of_minibatch, norm

    statistics: list[Tensor] = []
    norms: list[Tensor] = []
    for epoch in range(config.update_epochs):
        minibatches = order[epoch].chunk(config.num_minibatches), moments[epoch].unbind()
        for indices, of_advantages in zip(*minibatches, strict=True):
            of_minibatch, norm = train(indices, of_advantages)
            statistics.append(of_minibatch)
            norms.append(norm)
        if config.target_kl is not None:
            of_pass = slice(-config.num_minibatches, None)
            if _moved_too_far(statistics[of_pass], norms[of_pass], config.target_kl):
                break

    kept, totals, norm = _over_kept(statistics, norms)
    sums = global_sum(torch.cat((totals / (world_size() * kept), explained)))
    totals, explained = sums.tensor_split([len(STATISTICS)])
    metrics = dict(zip(STATISTICS, totals.unbind(), strict=True))
    metrics["grad_norm"] = norm / kept
    metrics["explained_variance"] = explained_variance_from_sums(explained)
    metrics["skipped"] = len(norms) - kept
    return metrics


def _over_kept(statistics: list[Tensor], norms: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the minibatches that were not skipped: how many, their sums [5] of ``STATISTICS``, and of norms."""
    of_each = torch.stack(norms).double()
    kept = of_each.isfinite()
    totals = torch.stack(statistics).double().where(kept.unsqueeze(1), 0.0).sum(0)
    return kept.sum(), totals, of_each.where(kept, 0.0).sum()


def _minibatch_moments(advantages: Tensor, valid: Tensor, order: Tensor, config: PPOConfig) -> Tensor:
    """Mean and std of the advantages, and the loss weight, of each minibatch: [epochs, minibatches, 3]."""
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
    return torch.stack((mean, std, weights), -1).to(advantages.dtype)


def _moved_too_far(statistics: list[Tensor], norms: list[Tensor], target_kl: float) -> bool:
    """Whether a pass's KL exceeds the target; summed over ranks first, so that all of them stop alike."""
    kept, totals, _ = _over_kept(statistics, norms)
    kl = totals[STATISTICS.index("approx_kl")] / (kept * world_size())
    return bool(global_sum(kl) > target_kl)
