"""Invariant 4: Fabric ≡ Trainer, bit for bit."""

from typing import Any

import pytest

from tests.equivalence.runs import assert_equal_weights, by_fabric, by_trainer, differ, without_time

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr_schedule": "constant"},
    "annealed": {"lr_schedule": "cosine", "warm_up_share": 0.5},
    "accumulated": {"accumulate_grad_batches": 4},
    "stopped early": {"target_kl": 1e-5},
}


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_both_engines_give_the_same_weights_and_metrics(env: str, options: dict[str, Any]) -> None:
    weights, metrics = by_trainer(env, **options)
    fabric_weights, fabric_metrics = by_fabric(env, **options)
    assert_equal_weights(weights, fabric_weights)
    # The Trainer keeps its metrics as float32.
    assert without_time(metrics) == pytest.approx(without_time(fabric_metrics), rel=1e-6)


def test_the_options_matter() -> None:
    runs = [by_fabric(**options)[0] for options in OPTIONS.values()]
    for number, one in enumerate(runs):
        assert all(differ(one, other) for other in runs[:number])
