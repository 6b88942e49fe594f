"""Invariant 8: `gae` is the sum of the paper's equation 16, worked out in float64 one number at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.functional import gae

TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 2e-5)}


def oracle(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """A_t = Σ_l (γλ)^l δ_{t+l}, the sum ending with the step that ended the episode or the rollout."""
    horizon, num_envs = rewards.shape
    advantages = torch.zeros(horizon, num_envs, dtype=torch.float64)
    for n in range(num_envs):
        for t in range(horizon):
            total, weight = 0.0, 1.0
            for k in range(t, horizon):
                future = 0.0 if terminated[k, n] else gamma * float(next_values[k, n])
                total += weight * (float(rewards[k, n]) + future - float(values[k, n]))
                weight *= gamma * gae_lambda
                if terminated[k, n] or truncated[k, n]:
                    break
            advantages[t, n] = total
    return advantages


def random_rollout(
    horizon: int, num_envs: int, end_share: float, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, horizon, num_envs, generator=generator, dtype=dtype)
    terminated, truncated = torch.rand(2, horizon, num_envs, generator=generator) < end_share
    return rewards, values, next_values, terminated, truncated


@settings(max_examples=60, deadline=None)
@given(
    horizon=st.integers(1, 10),
    num_envs=st.integers(1, 4),
    end_share=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    gamma=st.floats(0.0, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_gae_equals_the_papers_sum(
    horizon: int,
    num_envs: int,
    end_share: float,
    gamma: float,
    gae_lambda: float,
    seed: int,
    dtype: torch.dtype,
) -> None:
    rollout = random_rollout(horizon, num_envs, end_share, seed, dtype)
    advantages = gae(*rollout, gamma, gae_lambda)
    assert advantages.dtype == dtype
    rtol, atol = TOLERANCES[dtype]
    assert_close(advantages.double(), oracle(*rollout, gamma, gae_lambda), rtol=rtol, atol=atol)


def test_the_sum_tells_the_well_known_mistakes_apart() -> None:
    rewards, values, next_values, terminated, truncated = random_rollout(8, 4, 0.2, 0, torch.float64)
    never = torch.zeros_like(terminated)
    mistakes = {
        "truncation taken for termination": (next_values, terminated | truncated, never),
        "truncation ignored": (next_values, terminated, never),
        "termination taken for truncation": (next_values, never, terminated | truncated),
        "this step's value as the next one": (values, terminated, truncated),
        "the next row's flags": (next_values, terminated.roll(-1, 0), truncated.roll(-1, 0)),
    }
    expected = oracle(rewards, values, next_values, terminated, truncated, 0.99, 0.95)
    assert_close(gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95), expected)
    for arguments in mistakes.values():
        with pytest.raises(AssertionError, match="not close"):
            assert_close(gae(rewards, values, *arguments, 0.99, 0.95), expected)
