"""Normalisation of observations and rewards leaves the other invariants as they are."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from puffer_lightning.engines import PPO, iterations
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import Rollout
from tests.distributed.processes import run_ranks
from tests.equivalence.runs import (
    assert_equal_weights,
    by_fabric,
    by_trainer,
    differ,
    make_run,
    quiet_trainer,
    without_time,
)

NORMALIZED: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def statistics(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if "normalizer" in name}


def test_fabric_and_the_trainer_are_equal_bit_for_bit() -> None:
    (one, one_metrics), (other, other_metrics) = by_trainer(**NORMALIZED), by_fabric(**NORMALIZED)
    assert_equal_weights(one, other)
    assert without_time(one_metrics) == pytest.approx(without_time(other_metrics), rel=1e-6)
    assert len(statistics(one)) == 6
    plain, _ = by_fabric()
    assert differ(plain, {name: one[name] for name in plain})


def test_an_update_starts_where_the_rollout_was_in_every_iteration() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1, verbose=False)
    _, data = make_run("CartPole-v1", 4)
    model = PPO(update_epochs=1, num_minibatches=1, **NORMALIZED)
    means = []
    for metrics in iterations(fabric, model, data):
        assert metrics["train/approx_kl"] == 0
        assert metrics["train/clip_fraction"] == 0
        assert model.policy.observation_normalizer is not None
        means.append(model.policy.observation_normalizer.moments.mean.clone())
    data.close()
    assert len(means) == 4
    assert all(not torch.equal(one, other) for one, other in pairwise(means))


def test_statistics_are_those_of_all_valid_rows_and_evaluation_leaves_them_alone() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 3, **NORMALIZED)
    collect, seen = data.collect, []

    def recorded(*arguments: Any) -> Rollout:
        rollout = collect(*arguments)
        seen.append(rollout.observations[rollout.valid].double())
        return rollout

    data.collect = recorded  # type: ignore[method-assign]
    for _ in iterations(fabric, model, data):
        data.evaluate(model.policy)
    data.close()
    assert model.policy.observation_normalizer is not None
    moments, samples = model.policy.observation_normalizer.moments, torch.cat(seen)
    assert moments.count == len(samples) < 3 * 8 * 16
    torch.testing.assert_close(moments.mean, samples.mean(0))
    torch.testing.assert_close(moments.std, samples.std(0, correction=0))


def test_a_checkpoint_brings_the_statistics_back(tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 3, **NORMALIZED)
    trainer = quiet_trainer()
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    other, data = make_run("CartPole-v1", 3, **NORMALIZED)
    quiet_trainer().validate(other, datamodule=data, ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert_equal_weights(other.policy.state_dict(), model.policy.state_dict())
    assert model.policy.reward_normalizer is not None
    assert model.policy.reward_normalizer.moments.count > 0
    plain, data = make_run("CartPole-v1", 3)
    with pytest.raises(ConfigurationError, match=r"observation_normalizer.*model\.normalize_"):
        quiet_trainer().validate(plain, datamodule=data, ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)


def rank_of_a_run(rank: int) -> tuple[dict[str, Any], dict[str, float]]:
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 3, ranks=2, **NORMALIZED)
    trainer = quiet_trainer(strategy="ddp", devices=2)
    trainer.fit(model, datamodule=data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {name: tensor.numpy().copy() for name, tensor in model.policy.state_dict().items()}, metrics


def test_ranks_have_the_same_statistics_of_all_that_they_saw() -> None:
    (one, one_metrics), (other, other_metrics) = run_ranks(rank_of_a_run)
    assert without_time(one_metrics) == without_time(other_metrics)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    assert 3 * 8 * 16 < one["observation_normalizer.moments.count"] <= 3 * 8 * 16 * 2
