"""Where in a rollout, a policy or an update a number was not finite first."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from puffer_lightning.distributed import local_part, shares_data
from puffer_lightning.functional import gae, masked_sums, mean_and_std
from puffer_lightning.policies import Policy, unmasked
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.loss import minibatch_loss
from puffer_lightning.rollout import Batch, Rollout, make_batch


def first_non_finite(policy: Policy, rollout: Rollout, scaled: Rollout, config: PPOConfig) -> tuple[int, str]:
    """Look for a number that is not finite, in the order of cause and effect; slow.

    What comes after the rollout is looked for by computing it once more, with the policy as it is now.

    Args:
        policy: The policy, after the update.
        rollout: What it was trained on.
        scaled: The same with the rewards that it was trained on.
        config: The coefficients.

    Returns:
        How far down that order it is, and where: of which environment and at which step of the rollout, or of
        which parameter.
    """
    return next((n, place) for n, place in enumerate(_places(policy, rollout, scaled, config)) if place)


@torch.no_grad()
def _places(policy: Policy, rollout: Rollout, scaled: Rollout, config: PPOConfig) -> Iterator[str]:
    """A place or, where all is finite, an empty text, for each thing there is to look at."""
    valid = rollout.valid
    leaves, _ = tree_flatten_with_path(unmasked(rollout.observations))
    # Of steps that do not count, too, since they are in the same matrices.
    everywhere = torch.ones_like(valid)
    seen = (_at(f"observation{keystr(path)}", leaf, everywhere) for path, leaf in leaves)
    yield next(filter(None, seen), "")
    parameters = ((name, local_part(parameter)) for name, parameter in policy.named_parameters())
    yield next((f"parameter {name}" for name, held in parameters if not held.isfinite().all()), "")
    yield _at("logits", rollout.log_probs, valid)
    yield _at("value", rollout.values, everywhere)
    yield _at("reward", rollout.rewards, valid)
    yield _at("value after the step", rollout.next_values, valid & ~rollout.terminated)
    flags = rollout.terminated, rollout.truncated
    advantages = gae(
        scaled.rewards,
        scaled.values,
        scaled.next_values,
        *flags,
        config.gamma,
        config.gae_lambda,
        valid=valid,
    )
    # Which goes back from a step to those before it.
    yield _at("advantage", advantages, valid, last=True)
    if policy.sharding is None and not shares_data():
        # Of a policy that is divided among ranks, none can compute anything by itself.
        yield from _places_of_update(policy, make_batch(scaled, advantages), rollout, config)
    yield "a gradient that is finite by now"


def _places_of_update(policy: Policy, batch: Batch, rollout: Rollout, config: PPOConfig) -> Iterator[str]:
    units = torch.arange(batch.size, device=batch.valid.device)
    parts = units.chunk(config.num_minibatches * config.accumulate_grad_batches)
    mean, std = mean_and_std(masked_sums(batch.advantages.flatten(), batch.valid.flatten()))
    one = torch.ones_like(mean)

    def outputs(rows: Tensor) -> Tensor:
        part = batch.take(rows)
        return torch.stack(policy.evaluate(part.observations, part.actions, part.state, part.started))

    def loss(rows: Tensor) -> Tensor:
        return minibatch_loss(policy, batch.take(rows), mean, std, one, config)[0]

    log_probs, entropies, values = torch.cat([outputs(rows) for rows in parts], -1)
    for name, of_steps in (("logits", log_probs + entropies), ("value", values)):
        yield _at(f"{name} in the update", of_steps.view_as(rollout.valid), rollout.valid)
    yield next((_of_loss(rows, loss, rollout) for rows in parts if not loss(rows).isfinite()), "")
    yield next((f"the gradient of {name}" for rows in parts for name in _gradients(policy, loss, rows)), "")


def _of_loss(rows: Tensor, loss: Callable[[Tensor], Tensor], rollout: Rollout) -> str:
    """Which of these transitions, or sequences, has the loss that is not finite."""
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = rows[len(half) :] if loss(half).isfinite() else half
    step, environment = divmod(int(rows), rollout.num_envs)
    # Of sequences there are no more than environments.
    at = "" if tree_leaves(rollout.state) else f" at step {step} of the rollout"
    return f"the loss of environment {environment}{at}"


def _gradients(policy: Policy, loss: Callable[[Tensor], Tensor], rows: Tensor) -> Iterator[str]:
    """The parameters whose gradients are not finite; found past the hooks that would reduce them."""
    names, parameters = zip(*policy.named_parameters(), strict=True)
    with torch.enable_grad():
        of_loss: Any = torch.autograd.grad(loss(rows), parameters, allow_unused=True)
    for name, gradient in zip(names, of_loss, strict=True):
        if gradient is not None and not gradient.isfinite().all():
            yield name


def _at(what: str, of_steps: Tensor, counts: Tensor, last: bool = False) -> str:
    """The first (or last) place [t, n] where ``of_steps`` [T, N, ...] counts and is not finite."""
    bad = ~of_steps.isfinite().flatten(2).all(-1) if of_steps.ndim > 2 else ~of_steps.isfinite()
    bad &= counts
    if not bad.any():
        return ""
    step, environment = bad.nonzero()[-1 if last else 0].tolist()
    number = next(x for x in of_steps[step, environment].flatten().tolist() if not math.isfinite(x))
    return f"{number} in {what} of environment {environment} at step {step} of the rollout"
