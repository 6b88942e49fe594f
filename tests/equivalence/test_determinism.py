"""Two runs with one seed are one run."""

import pytest
import torch

from puffer_lightning.ppo import Metrics
from tests.equivalence.runs import assert_equal_weights, by_trainer, differ, without_time


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_one_seed_gives_one_run_bit_for_bit(env: str) -> None:
    one, metrics = by_trainer(env)
    torch.randn(7)
    other, other_metrics = by_trainer(env)
    assert_equal_weights(one, other)
    assert comparable(metrics) == comparable(other_metrics)


def comparable(metrics: Metrics) -> Metrics:
    kept = without_time(metrics)
    assert len(kept) > 5
    return kept


def test_another_seed_gives_another_run() -> None:
    one, metrics = by_trainer(seed=1)
    other, other_metrics = by_trainer(seed=2)
    assert differ(one, other)
    assert comparable(metrics) != comparable(other_metrics)
