"""Policies with memory: the update sees what acting saw, in minibatches and microbatches of sequences."""

import copy
import dataclasses
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.testing import assert_close

from puffer_lightning.envs.device import TorchMemoryMaze
from puffer_lightning.policies import LSTMPolicy, MLPEncoder, Policy, State, TransformerPolicy, make_head
from puffer_lightning.ppo import PPOConfig, minibatch_loss, update
from puffer_lightning.rollout import Batch, Collector, Rollout, make_batch
from tests.transitions import parameters_of

HORIZON, NUM_ENVS = 12, 8
MODES = list(AutoresetMode)


class RunningMean(Policy):
    """One step at a time is all it can do: forward knows nothing of sequences."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__()
        self.encoder = MLPEncoder(observation_space, (16,))
        self.head = make_head(16, action_space)
        self.critic = nn.Linear(16, 1)

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        return {"mean": torch.zeros(num_envs, 16, device=device)}

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        mean = 0.5 * state["mean"] + 0.5 * self.encoder(observations)
        return self.head(mean), self.critic(mean).squeeze(-1), {"mean": mean}


POLICIES = [LSTMPolicy, TransformerPolicy, RunningMean]


def maze(mode: AutoresetMode) -> TorchMemoryMaze:
    return TorchMemoryMaze(NUM_ENVS, length=2, max_episode_steps=5, autoreset_mode=mode)


def cart_poles(mode: AutoresetMode) -> Any:
    return gym.make_vec(
        "CartPole-v1", NUM_ENVS, "sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=9
    )


def collected(kind: type[Any], env: Any) -> tuple[Policy, list[Rollout]]:
    torch.manual_seed(0)
    policy: Policy = kind(env.single_observation_space, env.single_action_space)
    nn.init.normal_(policy.head.linear.weight, std=0.3)  # type: ignore[arg-type]
    collector = Collector(env, HORIZON)
    rollouts = [copy.deepcopy(collector.collect(policy)) for _ in range(2)]
    env.close()
    return policy, rollouts


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("make_env", [maze, cart_poles])
@pytest.mark.parametrize("kind", POLICIES)
@torch.no_grad()
def test_the_update_finds_the_log_probs_and_values_of_the_rollout(
    kind: type[Any], make_env: Any, mode: AutoresetMode
) -> None:
    policy, rollouts = collected(kind, make_env(mode))
    for rollout in rollouts:
        assert rollout.started.any()
        batch = make_batch(rollout, torch.zeros(HORIZON, NUM_ENVS)).take(torch.tensor([5, 0, 2]))
        evaluation = policy.evaluate(batch.observations, batch.actions, batch.state, batch.started)
        assert_close(evaluation.log_probs, batch.log_probs, rtol=2e-6, atol=2e-6)
        assert_close(evaluation.values, batch.values, rtol=2e-6, atol=2e-6)


def test_a_state_that_is_not_put_back_would_be_noticed() -> None:
    policy, (rollout, _) = collected(LSTMPolicy, maze(AutoresetMode.SAME_STEP))
    never = torch.zeros_like(rollout.started)
    evaluation = policy.evaluate(rollout.observations, rollout.actions, rollout.state, never)
    assert (evaluation.values - rollout.values).abs().max() > 1e-3


def learned(
    policy: Policy, rollout: Rollout, loss_function: Any = minibatch_loss, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    policy = copy.deepcopy(policy)
    metrics = update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.3),
        rollout,
        PPOConfig(update_epochs=2, num_minibatches=2, **options),
        torch.Generator().manual_seed(0),
        loss_function=loss_function,
    )
    return parameters_of(policy), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("kind", POLICIES)
def test_microbatches_of_sequences_add_up_to_their_minibatch(kind: type[Any]) -> None:
    policy, (_, rollout) = collected(kind, cart_poles(AutoresetMode.NEXT_STEP))
    assert not rollout.valid.all()
    whole, metrics = learned(policy, rollout)
    parts, metrics_of_parts = learned(policy, rollout, accumulate_grad_batches=4)
    assert (whole - parameters_of(policy)).abs().max() > 1e-3
    assert_close(parts, whole, rtol=0, atol=2e-6)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-3, abs=1e-6)


def test_advantages_are_normalised_over_the_minibatch() -> None:
    policy, (_, rollout) = collected(LSTMPolicy, cart_poles(AutoresetMode.NEXT_STEP))
    means = []

    def checked(policy: Policy, batch: Batch, mean: Tensor, std: Tensor, weight: Tensor, *rest: Any) -> Any:
        advantages = batch.advantages[batch.valid]
        assert_close((mean, std), (advantages.mean(), advantages.std()))
        assert weight == 1 / len(advantages)
        means.append(mean.item())
        return minibatch_loss(policy, batch, mean, std, weight, *rest)

    learned(policy, rollout, checked)
    assert len(set(means)) == 4, "minibatches differ"


@pytest.mark.parametrize("kind", POLICIES)
def test_nothing_is_learned_from_reset_steps(kind: type[Any]) -> None:
    policy, (_, rollout) = collected(kind, cart_poles(AutoresetMode.NEXT_STEP))
    reset = ~rollout.valid
    assert reset[:-1].any()
    expected, _ = learned(policy, rollout)

    def changed(steps: Tensor) -> Tensor:
        return steps.where(~reset.view(*reset.shape, *[1] * (steps.ndim - 2)), 7.0)

    other = dataclasses.replace(
        rollout,
        observations=changed(rollout.observations),
        log_probs=changed(rollout.log_probs),
        values=changed(rollout.values),
        rewards=changed(rollout.rewards),
    )
    assert torch.equal(learned(policy, other)[0], expected)
    rollout.values[~reset] += 1.0
    assert not torch.equal(learned(policy, rollout)[0], expected)


def test_gradients_flow_from_a_step_to_those_before_it() -> None:
    """The sign of the maze is seen at the first step only, and counts at the last."""
    policy, (rollout, _) = collected(LSTMPolicy, maze(AutoresetMode.SAME_STEP))
    batch = make_batch(rollout, torch.randn(HORIZON, NUM_ENVS))
    valid = torch.zeros_like(batch.valid)
    valid[3] = True
    batch = batch._replace(
        valid=valid, started=torch.zeros_like(valid), observations=batch.observations.requires_grad_()
    )
    one = torch.ones(())
    loss, _ = minibatch_loss(policy, batch, 0 * one, one, one, PPOConfig())
    torch.autograd.backward(loss)
    assert batch.observations.grad[:4].any(-1).all()
    assert not batch.observations.grad[4:].any()
