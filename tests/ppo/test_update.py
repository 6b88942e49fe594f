import dataclasses
import math
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.functional import explained_variance, gae
from puffer_lightning.ppo import PPOConfig, minibatch_loss, update
from puffer_lightning.rollout import Rollout, flatten
from tests.transitions import ExactPolicy, parameters_of, random_rollout

CONFIG = PPOConfig(update_epochs=2, num_minibatches=4)


def train(
    config: PPOConfig = CONFIG,
    rollout: Rollout | None = None,
    learning_rate: float = 0.1,
    seed: int = 0,
    **options: Any,
) -> tuple[ExactPolicy, dict[str, float]]:
    """A policy after one update by plain gradient descent, and the update's metrics."""
    policy = ExactPolicy()
    metrics = update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=learning_rate),
        rollout or random_rollout(policy),
        config,
        torch.Generator().manual_seed(seed),
        **options,
    )
    return policy, {name: value.item() for name, value in metrics.items()}


def learned(**arguments: Any) -> Tensor:
    return parameters_of(train(**arguments)[0])


def test_every_parameter_moves_and_stays_finite() -> None:
    before, after = ExactPolicy(), train()[0]
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new), name
        assert new.isfinite().all(), name


def test_one_pass_over_one_minibatch_is_a_gradient_step_on_the_mean_loss() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    config = PPOConfig(update_epochs=1, num_minibatches=1, max_grad_norm=math.inf)
    flags = rollout.terminated, rollout.truncated
    advantages = gae(rollout.rewards, rollout.values, rollout.next_values, *flags, 0.99, 0.95)
    valid = advantages[rollout.valid]
    moments = valid.mean(), valid.std(), torch.tensor(1.0 / len(valid), dtype=torch.float64)
    loss, _ = minibatch_loss(policy, flatten(rollout, advantages), *moments, config)
    torch.autograd.backward(loss)
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert_close(learned(config=config), parameters_of(policy), rtol=1e-10, atol=1e-12)


def spoil(rollout: Rollout, names: tuple[str, ...], junk: float) -> Rollout:
    """The rollout with other contents in the rows of its reset steps."""
    spoilt = {name: getattr(rollout, name).where(rollout.valid, junk) for name in names}
    assert any(not torch.equal(spoilt[name], getattr(rollout, name)) for name in names)
    return dataclasses.replace(rollout, **spoilt)


@pytest.mark.parametrize("junk", [1e9, -1e9, math.nan, math.inf])
def test_reset_steps_have_no_influence(junk: float) -> None:
    rollout = random_rollout(ExactPolicy())
    policy, metrics = train(rollout=rollout)
    other, other_metrics = train(rollout=spoil(rollout, ("rewards", "log_probs"), junk))
    assert torch.equal(parameters_of(policy), parameters_of(other))
    assert metrics == other_metrics


def test_actions_and_observations_of_reset_steps_have_no_influence() -> None:
    rollout = random_rollout(ExactPolicy())
    other = dataclasses.replace(
        rollout,
        observations=rollout.observations.where(rollout.valid.unsqueeze(-1), 5.0),
        actions=rollout.actions.where(rollout.valid, 0),
    )
    assert_close(learned(rollout=other), learned(rollout=rollout), rtol=1e-12, atol=1e-14)


def test_training_on_reset_steps_would_show() -> None:
    rollout = random_rollout(ExactPolicy())
    unmasked = dataclasses.replace(rollout, valid=torch.ones_like(rollout.valid))
    spoilt = spoil(rollout, ("rewards",), 1e3)
    unmasked_and_spoilt = dataclasses.replace(spoilt, valid=unmasked.valid)
    assert (learned(rollout=unmasked) - learned(rollout=rollout)).abs().max() > 1e-3
    assert (learned(rollout=unmasked_and_spoilt) - learned(rollout=unmasked)).abs().max() > 1e-3


def passes(config: PPOConfig) -> int:
    """How often an update visits each transition."""
    visited: list[int] = []

    def loss(policy: ExactPolicy, batch: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        visited.append(len(batch.valid))
        return minibatch_loss(policy, batch, *rest)

    train(config, loss_function=loss)
    assert sum(visited) % 64 == 0
    return sum(visited) // 64


@pytest.mark.parametrize("accumulate", [1, 4])
def test_all_passes_are_made_without_a_target_kl(accumulate: int) -> None:
    assert passes(PPOConfig(update_epochs=3, accumulate_grad_batches=accumulate)) == 3
    assert passes(PPOConfig(update_epochs=3, accumulate_grad_batches=accumulate, target_kl=1e9)) == 3


@pytest.mark.parametrize("accumulate", [1, 4])
def test_no_pass_follows_one_that_exceeds_the_target_kl(accumulate: int) -> None:
    config = PPOConfig(update_epochs=3, accumulate_grad_batches=accumulate)
    by_pass = [kl_of_pass(config, number) for number in range(3)]
    stops = set()
    for target in (factor * kl for kl in by_pass for factor in (0.99, 1.01)):
        exceeded = [number for number, kl in enumerate(by_pass, start=1) if kl > target]
        assert passes(dataclasses.replace(config, target_kl=target)) == min([*exceeded, 3])
        stops |= {*exceeded[:1]}
    assert stops >= {1, 2} or stops >= {1, 3}


def kl_of_pass(config: PPOConfig, number: int) -> float:
    """Mean KL of one pass alone, from the mean of all passes up to it and up to the one before."""
    until, before = (
        metrics_of(dataclasses.replace(config, update_epochs=n))["approx_kl"] * n if n else 0.0
        for n in (number + 1, number)
    )
    return until - before


def metrics_of(config: PPOConfig, **options: Any) -> dict[str, float]:
    return train(config, **options)[1]


def test_gradients_are_clipped_to_the_norm() -> None:
    config = PPOConfig(update_epochs=1, num_minibatches=1)
    start = parameters_of(ExactPolicy())
    free, metrics = train(dataclasses.replace(config, max_grad_norm=math.inf))
    norm = metrics["grad_norm"]
    assert (parameters_of(free) - start).norm().item() == pytest.approx(0.1 * norm)
    clipped, clipped_metrics = train(dataclasses.replace(config, max_grad_norm=norm / 10))
    assert (parameters_of(clipped) - start).norm().item() == pytest.approx(0.1 * norm / 10, rel=1e-4)
    assert clipped_metrics["grad_norm"] == pytest.approx(norm), "as it was before clipping"


def test_no_gradient_is_left_over_from_the_minibatch_before() -> None:
    once, thrice = (
        train(PPOConfig(update_epochs=epochs, num_minibatches=1, max_grad_norm=math.inf), learning_rate=0.0)
        for epochs in (1, 3)
    )
    # Weights that do not move have the same gradient at every pass.
    assert thrice[1]["grad_norm"] == pytest.approx(once[1]["grad_norm"])


def test_gradients_are_clipped_once_a_minibatch() -> None:
    config = PPOConfig(update_epochs=1, num_minibatches=2, accumulate_grad_batches=4, max_grad_norm=0.3)
    norms: list[float] = []

    def clip(norm: float) -> Tensor:
        norms.append(norm)
        return torch.tensor(2.0 * len(norms))

    assert metrics_of(config, clip=clip)["grad_norm"] == 3.0
    assert norms == [0.3, 0.3]


def test_metrics_are_means_over_the_valid_transitions() -> None:
    """Without a learning rate the policy stays what it was, so each can be worked out from the rollout."""
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    metrics = metrics_of(PPOConfig(accumulate_grad_batches=2), learning_rate=0.0)
    valid = rollout.valid
    with torch.no_grad():
        log_probs, entropies, _ = policy.evaluate(rollout.observations, rollout.actions)
    log_ratio = (log_probs - rollout.log_probs)[valid]
    flags = rollout.terminated, rollout.truncated
    advantages = gae(rollout.rewards, rollout.values, rollout.next_values, *flags, 0.99, 0.95)
    share = log_ratio.exp().sub(1.0).abs().gt(0.2).double().mean()
    assert 0 < share < 1
    # Minibatches hold unequally many valid rows, and each counts as one.
    assert metrics["entropy"] == pytest.approx(entropies[valid].mean().item(), rel=0.1)
    assert metrics["approx_kl"] == pytest.approx((log_ratio.expm1() - log_ratio).mean().item(), rel=0.1)
    assert metrics["clip_fraction"] == pytest.approx(share.item(), rel=0.2)
    assert metrics["value_loss"] == pytest.approx((advantages[valid].square() / 2).mean().item(), rel=0.1)
    expected = explained_variance(rollout.values, advantages + rollout.values, valid).item()
    assert metrics["explained_variance"] == pytest.approx(expected, rel=1e-9)


def test_metrics_of_a_single_minibatch_are_exact() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    metrics = metrics_of(PPOConfig(num_minibatches=1, accumulate_grad_batches=4), learning_rate=0.0)
    with torch.no_grad():
        log_probs, entropies, _ = policy.evaluate(rollout.observations, rollout.actions)
    log_ratio = (log_probs - rollout.log_probs)[rollout.valid]
    assert metrics["entropy"] == pytest.approx(entropies[rollout.valid].mean().item(), rel=1e-6)
    assert metrics["approx_kl"] == pytest.approx((log_ratio.expm1() - log_ratio).mean().item(), rel=1e-6)


def test_after_a_stop_metrics_are_over_the_passes_that_were_made() -> None:
    one = metrics_of(PPOConfig(update_epochs=1))
    stopped = metrics_of(PPOConfig(update_epochs=5, target_kl=1e-9))
    # The orders of the passes are drawn together, yet the first is the same.
    assert stopped == pytest.approx(one, rel=1e-6)


def test_gradients_stay_on_the_rank_for_all_microbatches_but_the_last() -> None:
    events: list[str] = []

    @contextmanager
    def no_sync() -> Any:
        events.append("(")
        yield
        events.append(")")

    def backward(loss: Tensor) -> None:
        events.append("b")
        torch.autograd.backward(loss)

    config = PPOConfig(update_epochs=1, num_minibatches=2, accumulate_grad_batches=3)
    policy = ExactPolicy()
    rollout = random_rollout(policy, horizon=6)
    train(config, rollout, backward=backward, no_sync=no_sync)
    assert "".join(events) == "(b)(b)b" * 2


@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_advantages_are_normalised_over_the_valid_part_of_each_minibatch(accumulate: int) -> None:
    seen: dict[str, list[Tensor]] = {"global": [], "none": []}

    def recorder(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def loss(policy: Any, batch: Any, mean: Tensor, std: Tensor, weight: Tensor, config: Any) -> Any:
            seen[kind].append(torch.where(batch.valid, (batch.advantages - mean) / std, torch.nan))
            return minibatch_loss(policy, batch, mean, std, weight, config)

        return loss

    for kind in ("global", "none"):
        config = PPOConfig(accumulate_grad_batches=accumulate, normalize_advantages=kind)
        train(config, loss_function=recorder(kind))
    minibatches = torch.cat(seen["global"]).view(16, 16)
    for minibatch, plain in zip(minibatches, torch.cat(seen["none"]).view(16, 16), strict=True):
        known = minibatch[~minibatch.isnan()]
        assert 2 < len(known) <= 16
        assert known.mean().item() == pytest.approx(0.0, abs=1e-9)
        assert known.std().item() == pytest.approx(1.0)
        assert plain[~plain.isnan()].std().item() != pytest.approx(1.0, abs=1e-2)


def test_rewards_are_never_clamped() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    ended = dataclasses.replace(rollout, rewards=rollout.rewards * 1e4)
    config = PPOConfig(update_epochs=1, num_minibatches=1)
    for given in (rollout, ended):
        flags = given.terminated, given.truncated
        advantages = gae(given.rewards, given.values, given.next_values, *flags, 0.99, 0.95)
        expected = (advantages[given.valid].square() / 2).mean().item()
        assert metrics_of(config, rollout=given)["value_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_shuffle_is_that_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(learned(seed=1), learned(seed=1))
    assert not torch.equal(learned(seed=1), learned(seed=2))
    module = import_module("puffer_lightning.ppo.update")
    monkeypatch.setattr(
        module, "shuffled_indices", lambda size, epochs, _: torch.arange(size).repeat(epochs, 1)
    )
    assert torch.equal(learned(seed=1), learned(seed=2))


def test_a_rollout_of_reset_steps_alone_teaches_nothing() -> None:
    rollout = random_rollout(ExactPolicy())
    nothing = dataclasses.replace(rollout, valid=torch.zeros_like(rollout.valid))
    policy, metrics = train(rollout=nothing)
    assert torch.equal(parameters_of(policy), parameters_of(ExactPolicy()))
    assert metrics == dict.fromkeys(metrics, 0.0)
