from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.policies import Policy, State, make_head


class Counter(Policy):
    """Reads a dict, remembers how often it was called, and computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = make_head(2, spaces.Discrete(3))
        self.critic = nn.Linear(2, 1)
        self.bfloat16()

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        return torch.zeros(num_envs, device=device)

    def forward(self, observations: dict[str, Tensor], state: State = ()) -> tuple[Tensor, Tensor, State]:
        features = torch.stack((observations["a"], observations["b"]), -1).bfloat16()
        return self.head(features), self.critic(features).squeeze(-1), state + 1


@pytest.fixture
def policy() -> Counter:
    torch.manual_seed(0)
    return Counter()


OBSERVATIONS = {"a": torch.arange(5.0), "b": torch.ones(5)}


def noise_for(policy: Policy) -> Tensor:
    noise = torch.empty(5, policy.head.noise_size)
    policy.head.fill_noise(noise, torch.Generator().manual_seed(0))
    return noise


def test_methods_agree_with_forward_and_the_head(policy: Counter) -> None:
    state, noise = policy.initial_state(5), noise_for(policy)
    params, values, _ = policy(OBSERVATIONS, state)
    action = policy.act(OBSERVATIONS, noise, state)
    expected, log_probs = policy.head.sample(params, noise)
    assert torch.equal(action.actions, expected)
    assert torch.equal(action.log_probs, log_probs)
    assert torch.equal(action.values, values.float())
    evaluation = policy.evaluate(OBSERVATIONS, action.actions, state)
    assert torch.equal(evaluation.log_probs, log_probs)
    assert torch.equal(evaluation.entropies, policy.head.evaluate(params, expected)[1])
    assert torch.equal(evaluation.values, values.float())
    assert torch.equal(policy.greedy(OBSERVATIONS, state)[0], params.argmax(-1))
    assert torch.equal(policy.value(OBSERVATIONS, state), values.float())


def test_the_state_passes_through(policy: Counter) -> None:
    state = policy.initial_state(5)
    state = policy.act(OBSERVATIONS, noise_for(policy), state).state
    _, state = policy.greedy(OBSERVATIONS, state)
    assert state.tolist() == [2] * 5


def test_results_are_float32_whatever_the_network_computes_in(policy: Counter) -> None:
    state = policy.initial_state(5)
    action = policy.act(OBSERVATIONS, noise_for(policy), state)
    evaluation = policy.evaluate(OBSERVATIONS, action.actions, state)
    results = [action.log_probs, action.values, *evaluation, policy.value(OBSERVATIONS, state)]
    assert {result.dtype for result in results} == {torch.float32}
    assert {result.shape for result in results} == {(5,)}


def test_every_method_runs_the_hooks_of_the_module(policy: Counter) -> None:
    calls: list[Any] = []
    policy.register_forward_pre_hook(lambda module, arguments: calls.append(arguments))
    state = policy.initial_state(5)
    policy.act(OBSERVATIONS, noise_for(policy), state)
    policy.greedy(OBSERVATIONS, state)
    policy.evaluate(OBSERVATIONS, torch.zeros(5, dtype=torch.int64), state)
    policy.value(OBSERVATIONS, state)
    assert len(calls) == 4
