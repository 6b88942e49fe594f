import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, Optimizer
from torch.testing import assert_close

from puffer_lightning.policies import LSTMPolicy, MLPPolicy, Policy
from puffer_lightning.ppo import PPOConfig, update
from puffer_lightning.ppo.compiled import CompiledAct, CompiledMinibatches
from puffer_lightning.rollout import Collector, Rollout
from tests.compiling import needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("forget_compiled")]

CONFIG = PPOConfig(update_epochs=2, num_minibatches=2, max_grad_norm=0.1)


def make_policy(seed: int = 0, kind: type[Policy] = MLPPolicy, **options: Any) -> Policy:
    torch.manual_seed(seed)
    return kind(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), **options)  # type: ignore[call-arg]


def collect(policy: Policy, act: Any = None, num_envs: int = 8) -> Rollout:
    env = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
    return Collector(env, 16).collect(policy, act)


def small() -> Policy:
    return make_policy(hidden_sizes=(16,))


def train(
    policy: Policy,
    rollout: Rollout,
    make: Callable[..., Optimizer],
    configs: list[PPOConfig],
    compiled: CompiledMinibatches | None = None,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], Optimizer]:
    """Weights and metrics after an update with each of these coefficients, and the optimizer."""
    optimizer, generator = make(policy.parameters()), torch.Generator().manual_seed(0)
    metrics = [update(policy, optimizer, rollout, config, generator, compiled=compiled) for config in configs]
    return policy.state_dict(), metrics, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Adam(p, lr=0.01, fused=True),
        lambda p: Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
        lambda p: SGD(p, lr=0.1),
    ],
    ids=["fused Adam", "Adam", "SGD"],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_trains_as_without_it(make: Callable[..., Optimizer], parts: int) -> None:
    configs = [replace(CONFIG, accumulate_grad_batches=parts, ent_coef=ent_coef) for ent_coef in (0.01, 0.5)]
    policy, other = small(), small()
    rollout = collect(policy)
    weights, metrics, optimizer = train(policy, rollout, make, configs)
    compiled = CompiledMinibatches(other)
    graphs_before = counters["stats"]["unique_graphs"]
    same, same_metrics, its_optimizer = train(other, rollout, make, [*configs], compiled)
    assert counters["stats"]["unique_graphs"] == graphs_before + 1, "ent_coef is no reason to compile anew"
    for name, of_one in weights.items():
        assert_close(same[name], of_one, rtol=1e-4, atol=1e-6)
    for one, other_metrics in zip(metrics, same_metrics, strict=True):
        assert_close(other_metrics, one, rtol=1e-3, atol=1e-5)
    for state, its_state in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert_close(its_state, state, rtol=1e-3, atol=1e-6)


def test_gradients_lie_as_their_parameters_do() -> None:
    # A fused optimizer reads them as if they did.
    policy = small()
    rollout = collect(policy)
    train(policy, rollout, lambda p: SGD(p, lr=0.1), [CONFIG], CompiledMinibatches(policy))
    for parameter in policy.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("make", [lambda p: Adam(p, lr=0.1), lambda p: SGD(p, lr=0.1)], ids=["Adam", "SGD"])
def test_minibatches_that_are_not_finite_change_nothing(make: Callable[..., Optimizer]) -> None:
    policy = small()
    rollout = collect(policy)
    compiled, generator = CompiledMinibatches(policy), torch.Generator().manual_seed(0)
    optimizer = make(policy.parameters())
    update(policy, optimizer, rollout, CONFIG, generator, compiled=compiled)
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    state = [{k: v.clone() for k, v in of.items()} for of in optimizer.state.values()]
    bad = replace(rollout, rewards=torch.full_like(rollout.rewards, math.nan))
    metrics = update(policy, optimizer, bad, CONFIG, generator, compiled=compiled)
    assert metrics["skipped"] == 4
    assert_close(policy.state_dict(), weights, rtol=0, atol=0)
    assert_close([dict(of) for of in optimizer.state.values()], state, rtol=0, atol=0)
    assert update(policy, optimizer, rollout, CONFIG, generator, compiled=compiled)["skipped"] == 0


@pytest.mark.parametrize("kind", [MLPPolicy, LSTMPolicy])
def test_acts_as_without_it_and_policies_do_not_mix(kind: type[Policy]) -> None:
    policies = [make_policy(seed, kind) for seed in (0, 1)]
    acts = [CompiledAct(policy) for policy in policies]
    for _ in range(2):
        rollouts = [
            (collect(policy, act), collect(policy)) for policy, act in zip(policies, acts, strict=True)
        ]
        for compiled, eager in rollouts:
            assert torch.equal(compiled.actions, eager.actions)
            for name in ("log_probs", "values", "next_values"):
                assert_close(getattr(compiled, name), getattr(eager, name), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(rollouts[0][0].values, rollouts[1][0].values)
        with torch.no_grad():
            # Weights that change are seen.
            policies[0].critic.weight.mul_(3)  # type: ignore[union-attr, operator]


def test_batches_of_many_sizes_are_not_compiled_time_and_again() -> None:
    policy = small()
    act, noise = CompiledAct(policy), torch.zeros(9, 2)
    with torch.no_grad():
        for size in [*range(1, 10), *range(1, 10)]:
            observations = torch.randn(size, 4)
            action, eager = act(observations, noise[:size]), policy.act(observations, noise[:size])
            assert_close(action.values, eager.values, rtol=1e-4, atol=1e-6)
            assert torch.equal(action.actions, eager.actions)
    assert len(act._by_kind) == 4


def test_without_a_compiler_training_goes_on_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object, **__: object) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", no_compiler)
    policy, other = small(), small()
    rollout = collect(policy)
    optimizer = lambda p: SGD(p, lr=0.1)  # noqa: E731
    weights, *_ = train(policy, rollout, optimizer, [CONFIG, CONFIG])
    with pytest.warns(
        UserWarning, match="the update goes on without being compiled: .*C\\+\\+ compiler found$"
    ):
        same, *_ = train(other, rollout, optimizer, [CONFIG, CONFIG], CompiledMinibatches(other))
    assert_close(same, weights, rtol=0, atol=0)
    act = CompiledAct(policy)
    with pytest.warns(UserWarning, match="acting goes on without being compiled"):
        first = collect(policy, act).actions.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(collect(policy, act).actions, first), "and is said once"
