"""Where a number was not finite first."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from puffer_lightning.policies import LSTMPolicy, MaskedObservations
from puffer_lightning.ppo import PPOConfig
from puffer_lightning.ppo.non_finite import first_non_finite
from puffer_lightning.rollout import Rollout
from tests.transitions import ExactPolicy, random_rollout

# Of a step that is valid and not the last of its episode.
T, N = 5, 0
AT = f"of environment {N} at step {T} of the rollout"


def place(policy: Any, rollout: Rollout) -> str:
    return first_non_finite(policy, rollout, rollout, PPOConfig())[1]


def spoilt(name: str, number: float = math.nan) -> str:
    """What is said of a rollout with this number in one place."""
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    getattr(rollout, name)[T, N] = number
    return place(policy, rollout)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("observations", "observation"),
        ("log_probs", "logits"),
        ("values", "value"),
        ("rewards", "reward"),
        ("next_values", "value after the step"),
    ],
)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_in_the_rollout(name: str, text: str, number: float) -> None:
    assert spoilt(name, number) == f"{number} in {text} {AT}"


def test_the_cause_comes_before_its_effects() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    rollout.rewards[0, 0] = math.nan
    rollout.observations[T, N, 1] = math.nan
    assert place(policy, rollout) == f"nan in observation {AT}"


def test_nested_observations_are_named() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    camera, speed = torch.zeros(8, 8, 2, dtype=torch.uint8), torch.zeros(8, 8, 1)
    speed[T, N] = math.inf
    nested = MaskedObservations({"camera": camera, "body": (camera, speed)}, torch.ones(8, 8, 4))
    rollout = dataclasses.replace(rollout, observations=nested)
    assert place(policy, rollout) == f"inf in observation['body'][1] {AT}"


def test_steps_that_do_not_count_are_not_looked_at() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    assert not rollout.valid.all()
    for name in ("rewards", "log_probs"):
        setattr(rollout, name, getattr(rollout, name).where(rollout.valid, math.nan))
    assert place(policy, rollout) == "a gradient that is finite by now"


def test_parameters_are_named() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    with torch.no_grad():
        policy.encoder.weight[0, 0] = math.inf
    assert place(policy, rollout) == "parameter encoder.weight"


def test_advantages_that_overflow() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    rollout.rewards[T, N] = 1e308
    rollout.values[T, N] = -1e308
    assert place(policy, rollout) == f"inf in advantage {AT}"


def broken(policy: ExactPolicy, output: str, row: Callable[[Tensor], Tensor]) -> ExactPolicy:
    """The policy with one output passed through a function."""
    evaluate = policy.evaluate

    def changed(*arguments: Any) -> Any:
        evaluation = evaluate(*arguments)
        return evaluation._replace(**{output: row(getattr(evaluation, output))})

    policy.evaluate = changed  # type: ignore[method-assign]
    return policy


@pytest.mark.parametrize(
    ("output", "text"), [("log_probs", "logits"), ("entropies", "logits"), ("values", "value")]
)
def test_of_the_policy_in_the_update(output: str, text: str) -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    marked = getattr(policy.evaluate(rollout.observations, rollout.actions), output)[T, N].item()
    broken(policy, output, lambda of_rows: of_rows.where((of_rows - marked).abs() > 1e-9, math.nan))
    assert place(policy, rollout) == f"nan in {text} in the update {AT}"


def test_of_the_loss() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    marked = policy.evaluate(rollout.observations, rollout.actions).values[T, N].item()
    broken(policy, "values", lambda of_rows: of_rows.where((of_rows - marked).abs() > 1e-9, 1e200))
    assert place(policy, rollout) == f"the loss {AT}"


def test_of_a_gradient() -> None:
    policy = ExactPolicy()
    rollout = random_rollout(policy)
    # Its value is 0, its gradient 0 · ∞.
    broken(policy, "values", lambda of_rows: of_rows + (0.0 * of_rows).abs().sqrt())
    assert place(policy, rollout) == "the gradient of encoder.weight"


def test_of_a_policy_with_memory() -> None:
    space = spaces.Box(-1, 1, (3,))
    policy = LSTMPolicy(space, spaces.Discrete(4))
    rollout = random_rollout(ExactPolicy())
    names = ("observations", "rewards", "values", "next_values", "log_probs")
    single = {name: getattr(rollout, name).float() for name in names}
    rollout = dataclasses.replace(rollout, state=policy.initial_state(8), **single)
    assert place(policy, rollout) == "a gradient that is finite by now"
    rollout.rewards[T, N] = 1e30
    assert place(policy, rollout) == f"the loss of environment {N}"
