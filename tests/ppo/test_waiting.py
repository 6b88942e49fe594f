"""An update hands a GPU its work and waits for none of it."""

from collections.abc import Iterator

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.optim import Adam, Optimizer

from puffer_lightning.envs import make_vector_env
from puffer_lightning.policies import MLPPolicy, Policy
from puffer_lightning.ppo import PPOConfig, update
from puffer_lightning.ppo.steps import step_unless
from puffer_lightning.rollout import Collector, Rollout
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
