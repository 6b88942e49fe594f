import pytest
import torch
from lightning.fabric import Fabric

from puffer_lightning.engines import PPO, iterations
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import STEPS_PER_ITERATION, data


@pytest.fixture
def fabric() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1, verbose=False)
    return fabric


def test_trains_until_the_total_is_reached(fabric: Fabric) -> None:
    model, rollouts = PPO(lr_schedule="linear"), data(4)
    rates = [metrics["train/learning_rate"] for metrics in iterations(fabric, model, rollouts)]
    assert rates == pytest.approx([2.5e-3 * share for share in (1.0, 0.75, 0.5, 0.25)])
    assert model.env_steps == 4 * STEPS_PER_ITERATION
    rollouts.close()


def test_waits_between_iterations(fabric: Fabric) -> None:
    model, rollouts = PPO(), data(3)
    run = iterations(fabric, model, rollouts)
    next(run)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    played = rollouts.evaluate(model.policy)
    assert played.lengths.shape == (2,)
    assert model.env_steps == STEPS_PER_ITERATION
    next(run)
    after = model.policy.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    rollouts.close()


def test_a_changed_coefficient_counts_from_the_next_iteration(fabric: Fabric) -> None:
    model, rollouts = PPO(), data(2)
    run = iterations(fabric, model, rollouts)
    assert next(run)["train/clip_fraction"] < 1.0
    model.config.clip_coef = 1e-9
    assert next(run)["train/clip_fraction"] > 0.5
    rollouts.close()


def test_refuses_what_does_not_divide(fabric: Fabric) -> None:
    with pytest.raises(ConfigurationError, match="num_minibatches 7 does not divide"):
        next(iterations(fabric, PPO(num_minibatches=7), data()))
