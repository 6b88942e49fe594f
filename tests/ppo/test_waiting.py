"""An update hands a GPU its work and waits for none of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.optim import Adam, Optimizer

from puffer_lightning.envs import make_vector_env
from puffer_lightning.policies import (
    LSTMPolicy,
    MLPPolicy,
    Policy,
    TransformerPolicy,
    make_normalizer,
    make_policy,
)
from puffer_lightning.ppo import PPOConfig, update
from puffer_lightning.ppo.steps import step_unless
from puffer_lightning.rollout import Collector, Rollout
from puffer_lightning.rollout.minibatches import shuffled_indices
from tests.waiting import ReadsOfScalars, WaitsForTheDevice

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def as_on_a_gpu(optimizer: Optimizer, norm: Tensor) -> None:
    step_unless(norm.isfinite().logical_not(), optimizer)


def collected(device: str = "cpu") -> tuple[Policy, Rollout]:
    torch.manual_seed(0)
    env = make_vector_env("puffer/TorchCartPole-v0", 8, {"device": device})
    assert isinstance(env.single_action_space, spaces.Discrete)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, (16,)).to(device)
    return policy, Collector(env, 16, device=device).collect(policy)


def waits(num_minibatches: int, **options: float) -> list[str]:
    policy, rollout = collected()
    optimizer, generator = Adam(policy.parameters(), fused=True), torch.Generator()
    config = PPOConfig(num_minibatches=num_minibatches, **options)  # type: ignore[arg-type]
    with WaitsForTheDevice() as python, ReadsOfScalars() as below:
        update(policy, optimizer, rollout, config, generator)
    return python.waits + below.waits


def test_nothing_is_waited_for_minibatch_by_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(update.__globals__, "step_if_finite", as_on_a_gpu)
    assert waits(2) == waits(16) == []
    assert len(waits(16, target_kl=100.0)) <= 2 * PPOConfig().update_epochs, "once or twice a pass"


def test_the_counters_see_an_update_that_waits() -> None:
    assert len(waits(16)) >= 16 * PPOConfig().update_epochs


@pytest.mark.parametrize("make", [make_policy, LSTMPolicy, TransformerPolicy], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "env", ["CartPole-v1", "Pendulum-v1", "puffer/ImageTarget-v0", "puffer/MultiDiscreteMatch-v0"]
)
def test_neither_acting_nor_an_update_needs_numbers(
    make: Callable[..., Policy], env: str, on_meta: Callable[..., dict[str, Tensor]]
) -> None:
    """Torch's "meta" is a device that is not the CPU and holds no numbers: reading one raises there."""
    made = make_vector_env(env, 8)
    policy = make(made.single_observation_space, made.single_action_space)
    if env != "puffer/ImageTarget-v0":
        policy.observation_normalizer = make_normalizer(made.single_observation_space)
    rollout = Collector(made, 4).collect(policy).to("meta")
    policy.to("meta")
    with torch.no_grad():
        noise = torch.empty(rollout.num_envs, policy.head.noise_size, device="meta")
        action = policy.act(rollout.observations[0], noise, policy.initial_state(rollout.num_envs, "meta"))
        policy.restart(action.state, rollout.terminated[0])
    config = PPOConfig(update_epochs=1, num_minibatches=2, accumulate_grad_batches=2)
    metrics = on_meta(policy, rollout, config)
    assert {value.device.type for value in metrics.values()} == {"meta"}
    if policy.observation_normalizer is not None:
        policy.observation_normalizer.update(rollout.observations, rollout.valid)
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        on_meta(policy, rollout, replace(config, target_kl=0.1))


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Callable[[Policy, Rollout, PPOConfig], dict[str, Tensor]]:
    """An update there, but for random numbers and fused optimizers, which torch does not have there."""
    monkeypatch.setitem(
        update.__globals__,
        "shuffled_indices",
        lambda size, epochs, generator: shuffled_indices(size, epochs, generator).to("meta"),
    )
    monkeypatch.setitem(update.__globals__, "step_if_finite", lambda optimizer, norm: norm.isfinite())

    def on_meta(policy: Policy, rollout: Rollout, config: PPOConfig) -> dict[str, Tensor]:
        return update(policy, Adam(policy.parameters()), rollout, config, torch.Generator())

    return on_meta


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@NO_GPU
@pytest.mark.usefixtures("no_waiting")
def test_nothing_is_waited_for_on_a_gpu() -> None:
    policy, rollout = collected("cuda")
    optimizer = Adam(policy.parameters(), fused=True)
    generator = torch.Generator("cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        update(policy, optimizer, rollout, PPOConfig(), generator)
