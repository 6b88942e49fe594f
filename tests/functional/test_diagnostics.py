import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from puffer_lightning.functional import (
    approx_kl,
    clip_fraction,
    explained_variance,
    explained_variance_from_sums,
    explained_variance_sums,
)

LN2 = math.log(2.0)
LOG_RATIO = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64).log()
# (2 - 1) - ln 2,  (½ - 1) + ln 2,  0
K3 = torch.tensor([1.0 - LN2, LN2 - 0.5, 0.0], dtype=torch.float64)

RETURNS = torch.tensor([1.0, 2.0, 3.0, 4.0])
VALUES = torch.tensor([1.0, 2.0, 3.0, 5.0])
ALL = torch.ones(4, dtype=torch.bool)


def test_approx_kl_by_hand() -> None:
    assert_close(approx_kl(LOG_RATIO), K3)


@pytest.mark.parametrize(
    "mistake",
    [-LOG_RATIO, 0.5 * LOG_RATIO.square(), approx_kl(-LOG_RATIO)],
    ids=["k1", "k2", "ratio upside down"],
)
def test_approx_kl_by_hand_tells_mistakes_apart(mistake: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_close(mistake, K3)


def test_approx_kl_is_unbiased_for_the_divergence_of_old_from_new() -> None:
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    new = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    divergence = (old * (old / new).log()).sum()
    reverse = (new * (new / old).log()).sum()
    expectation = (old * approx_kl((new / old).log())).sum()
    assert_close(expectation, divergence)
    assert abs(expectation - reverse) > 0.01


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=8))
def test_approx_kl_equals_the_formula_and_is_never_negative(log_ratios: list[float]) -> None:
    estimates = approx_kl(torch.tensor(log_ratios, dtype=torch.float64))
    expected = torch.tensor([math.exp(x) - 1.0 - x for x in log_ratios], dtype=torch.float64)
    assert_close(estimates, expected, rtol=1e-9, atol=1e-12)
    assert (estimates >= 0.0).all()


def test_approx_kl_keeps_small_divergences_in_float32() -> None:
    # (r - 1) - log r ≈ ½ log² r = 5e-7 to one part in a thousand; float32's exp(x) - 1 - x is off by more
    x = torch.tensor([1e-3])
    assert approx_kl(x).item() == pytest.approx(5e-7, rel=1e-3)
    assert ((x.exp() - 1.0) - x).item() != pytest.approx(5e-7, rel=1e-3)


def test_clip_fraction_by_hand() -> None:
    # |r - 1| = 0.3, 0.3, 0.1, 0.1, 0 against 0.2: both sides of the range count
    clipped = clip_fraction(torch.tensor([1.3, 0.7, 1.1, 0.9, 1.0]).log(), 0.2)
    assert clipped.dtype == torch.float32
    assert clipped.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_clip_fraction_measures_the_ratio_not_its_logarithm() -> None:
    # r = 1.21 is outside although log r = 0.19; r = 0.81 is inside although log r = -0.21
    assert clip_fraction(torch.tensor([1.21, 0.81]).log(), 0.2).tolist() == [1.0, 0.0]


def test_explained_variance_by_hand() -> None:
    # R - V = 0, 0, 0, -1: variance ¼ - 1/16 = 3/16; Var[R] = 7.5 - 6.25 = 1.25; 1 - 0.1875/1.25
    assert explained_variance(VALUES, RETURNS, ALL).item() == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RETURNS, 1.0),
        (RETURNS + 7.0, 1.0),  # a constant offset is no variance; the mean squared error would say -38.2
        (torch.full((4,), 2.5), 0.0),
        (torch.zeros(4), 0.0),
        (-RETURNS, -3.0),  # Var[2R] = 4 Var[R]
    ],
)
def test_explained_variance_of_known_cases(values: torch.Tensor, expected: float) -> None:
    assert explained_variance(values, RETURNS, ALL).item() == pytest.approx(expected, abs=1e-12)


def test_explained_variance_reads_valid_entries_of_any_shape() -> None:
    values, returns = torch.full((2, 3), torch.nan), torch.full((2, 3), torch.nan)
    values[:, :2], returns[:, :2] = VALUES.reshape(2, 2), RETURNS.reshape(2, 2)
    assert explained_variance(values, returns, ~returns.isnan()).item() == pytest.approx(0.85)


def test_explained_variance_sums_add_over_parts() -> None:
    parts = [explained_variance_sums(VALUES[i : i + 2], RETURNS[i : i + 2], ALL[:2]) for i in (0, 2)]
    assert parts[0].dtype == torch.float64
    # count, ΣR, ΣR², Σ(R - V), Σ(R - V)²
    assert sum(parts).tolist() == [4.0, 10.0, 30.0, -1.0, 1.0]  # type: ignore[union-attr]
    assert explained_variance_from_sums(parts[0] + parts[1]).item() == pytest.approx(0.85)
    mean_of_parts = (explained_variance_from_sums(parts[0]) + explained_variance_from_sums(parts[1])) / 2
    assert mean_of_parts.item() != pytest.approx(0.85)


@pytest.mark.parametrize("value", [0.0, 0.1, -123456.7])
def test_explained_variance_of_returns_that_do_not_vary_is_zero(value: float) -> None:
    returns, mask = torch.full((1000,), value), torch.ones(1000, dtype=torch.bool)
    assert explained_variance(torch.linspace(-1.0, 1.0, 1000), returns, mask).item() == 0.0


def test_explained_variance_of_nothing_is_zero() -> None:
    assert explained_variance(VALUES, RETURNS, ~ALL).item() == 0.0


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 50), seed=st.integers(0, 2**32 - 1), offset=st.floats(-100.0, 100.0))
def test_explained_variance_equals_the_formula(size: int, seed: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, returns = torch.randn(2, size, generator=generator, dtype=torch.float64) + offset
    mask = torch.rand(size, generator=generator) < 0.7
    mask[:2] = True
    expected = 1.0 - (returns - values)[mask].var() / returns[mask].var()
    assert_close(explained_variance(values, returns, mask), expected, rtol=1e-5, atol=1e-8)
