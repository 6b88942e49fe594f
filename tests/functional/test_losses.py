import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.functional import clipped_surrogate, value_loss

RATIOS = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0], dtype=torch.float64)
# r·A against clip(r, 0.8, 1.2)·A, the smaller, negated:
#   3.0 | 2.4,  -3.0 | -2.4,  1.0 | 1.6,  -1.0 | -1.6,  3.3 | 3.3
SURROGATE = torch.tensor([-2.4, 3.0, -1.0, 1.6, -3.3], dtype=torch.float64)

VALUES = torch.tensor([2.0, 0.0, 1.05], dtype=torch.float64)
OLD_VALUES = torch.ones(3, dtype=torch.float64)
RETURNS = torch.tensor([3.0, 0.9, 0.0], dtype=torch.float64)
# ½ (2 - 3)² = 0.5,  ½ (0 - 0.9)² = 0.405,  ½ · 1.05² = 0.55125
PLAIN = torch.tensor([0.5, 0.405, 0.55125], dtype=torch.float64)
# With ε = 0.1 the clipped values are 1.1, 0.9 and 1.05; ½ (1.1 - 3)² = 1.805, 0, 0.55125
CLIPPED = torch.tensor([1.805, 0.0, 0.55125], dtype=torch.float64)
LARGER = torch.tensor([1.805, 0.405, 0.55125], dtype=torch.float64)

rows = st.lists(st.tuples(*[st.floats(-3.0, 3.0)] * 3), min_size=1, max_size=8)


def surrogate_maximum(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.maximum(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)


def surrogate_unclipped(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    return -log_ratio.exp() * advantages


def surrogate_clipped_only(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    return -log_ratio.exp().clamp(1 - clip_coef, 1 + clip_coef) * advantages


def surrogate_gain(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    return -clipped_surrogate(log_ratio, advantages, clip_coef)


def test_surrogate_by_hand() -> None:
    assert_close(clipped_surrogate(RATIOS.log(), ADVANTAGES, 0.2), SURROGATE)


@pytest.mark.parametrize(
    "mistake", [surrogate_maximum, surrogate_unclipped, surrogate_clipped_only, surrogate_gain]
)
def test_surrogate_by_hand_tells_mistakes_apart(mistake: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_close(mistake(RATIOS.log(), ADVANTAGES, 0.2), SURROGATE)


def test_surrogate_gradient_vanishes_only_where_the_clip_pays() -> None:
    log_ratio = RATIOS.log().requires_grad_()
    (gradient,) = torch.autograd.grad(clipped_surrogate(log_ratio, ADVANTAGES, 0.2).sum(), log_ratio)
    # d(-r·A)/d(log r) = -r·A where the unclipped term is the smaller, 0 where the clipped one is.
    assert_close(gradient, torch.tensor([0.0, 3.0, -1.0, 0.0, -3.3], dtype=torch.float64))


@settings(max_examples=50, deadline=None)
@given(rows=rows, clip_coef=st.floats(0.01, 0.9))
def test_surrogate_equals_the_formula(rows: list[tuple[float, float, float]], clip_coef: float) -> None:
    log_ratio, advantages, _ = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    expected = []
    for x, advantage, _ in rows:
        ratio = math.exp(x)
        clipped = min(max(ratio, 1 - clip_coef), 1 + clip_coef)
        expected.append(-min(ratio * advantage, clipped * advantage))
    losses = clipped_surrogate(log_ratio, advantages, clip_coef)
    assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_value_loss_by_hand() -> None:
    assert_close(value_loss(VALUES, RETURNS), PLAIN)
    assert_close(value_loss(VALUES, RETURNS, OLD_VALUES), PLAIN)
    assert_close(value_loss(VALUES, RETURNS, OLD_VALUES, 0.1), LARGER)


@pytest.mark.parametrize(
    "mistake",
    [PLAIN, CLIPPED, torch.minimum(PLAIN, CLIPPED), 2 * LARGER],
    ids=["plain", "clipped", "min", "no ½"],
)
def test_clipped_value_loss_by_hand_tells_mistakes_apart(mistake: Tensor) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_close(mistake, value_loss(VALUES, RETURNS, OLD_VALUES, 0.1))


def test_value_loss_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    (plain,) = torch.autograd.grad(value_loss(values, RETURNS).sum(), values)
    assert_close(plain, VALUES - RETURNS)
    (clipped,) = torch.autograd.grad(value_loss(values, RETURNS, OLD_VALUES, 0.1).sum(), values)
    # The first sample is at its clip, which is the larger error there: nothing to gain by moving on.
    assert_close(clipped, torch.tensor([0.0, -0.9, 1.05], dtype=torch.float64))


def test_value_loss_cannot_clip_around_nothing() -> None:
    with pytest.raises(AssertionError, match="old_values"):
        value_loss(VALUES, RETURNS, clip_coef=0.1)


@settings(max_examples=50, deadline=None)
@given(rows=rows, clip_coef=st.floats(0.01, 2.0))
def test_value_loss_equals_the_formula(rows: list[tuple[float, float, float]], clip_coef: float) -> None:
    values, old_values, returns = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    plain, clipped = [], []
    for value, old_value, target in rows:
        near = old_value + min(max(value - old_value, -clip_coef), clip_coef)
        plain.append(0.5 * (value - target) ** 2)
        clipped.append(max(plain[-1], 0.5 * (near - target) ** 2))
    assert_close(value_loss(values, returns), torch.tensor(plain, dtype=torch.float64))
    losses = value_loss(values, returns, old_values, clip_coef)
    assert_close(losses, torch.tensor(clipped, dtype=torch.float64), rtol=1e-12, atol=1e-12)
