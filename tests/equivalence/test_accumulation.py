"""Invariant 1: a minibatch split into microbatches gives the gradients of the whole, exactly."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.functional import masked_sums, mean_and_std
from puffer_lightning.ppo import PPOConfig, minibatch_loss, update
from tests.transitions import ExactPolicy, parameters_of, random_rollout


def learned(accumulate: int, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Parameters after three passes of four minibatches, and the metrics."""
    policy = ExactPolicy()
    config = PPOConfig(
        update_epochs=3, num_minibatches=4, accumulate_grad_batches=accumulate, clip_value_loss=True
    )
    metrics = update(
        policy,
        torch.optim.Adam(policy.parameters(), lr=0.02),
        random_rollout(policy),
        config,
        torch.Generator().manual_seed(0),
        **options,
    )
    return parameters_of(policy), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("accumulate", [2, 4, 8, 16])
def test_microbatches_add_up_to_their_minibatch(accumulate: int) -> None:
    whole, metrics = learned(1)
    parts, metrics_of_parts = learned(accumulate)
    assert_close(parts, whole, rtol=0, atol=1e-12)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-5)


def test_the_parameters_moved_far_more_than_the_tolerance() -> None:
    assert (learned(1)[0] - parameters_of(ExactPolicy())).abs().min() > 1e-6


def advantages_of_the_microbatch(policy: Any, batch: Any, mean: Tensor, std: Tensor, *rest: Any) -> Any:
    own = mean_and_std(masked_sums(batch.advantages, batch.valid))
    return minibatch_loss(policy, batch, *own, *rest)


def mean_of_the_microbatch(
    policy: Any, batch: Any, mean: Tensor, std: Tensor, weight: Tensor, config: PPOConfig
) -> Any:
    own = 1.0 / (batch.valid.sum().clamp(min=1) * config.accumulate_grad_batches)
    return minibatch_loss(policy, batch, mean, std, own, config)


@pytest.mark.parametrize("mistake", [advantages_of_the_microbatch, mean_of_the_microbatch])
def test_the_well_known_mistakes_do_not_add_up(mistake: Any) -> None:
    whole, _ = learned(1)
    assert_close(learned(1, loss_function=mistake)[0], whole, rtol=0, atol=1e-9)
    assert (learned(4, loss_function=mistake)[0] - whole).abs().max() > 1e-4
