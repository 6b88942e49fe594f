import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from puffer_lightning.functional import masked_sums, mean_and_std, standardize

# Σ = 1 + 2 + 3 + 4 = 10, Σ² = 1 + 4 + 9 + 16 = 30; the last entry is not valid
X = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])
MASK = torch.tensor([True, True, True, True, False])


def test_by_hand() -> None:
    sums = masked_sums(X, MASK)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [4.0, 10.0, 30.0]
    mean, std = mean_and_std(sums)
    assert mean.item() == 2.5
    # Squared deviations 2.25 + 0.25 + 0.25 + 2.25 = 5, over n - 1 = 3
    assert std.item() == pytest.approx(math.sqrt(5 / 3))
    assert std.item() == pytest.approx(X[:4].std().item())
    assert std.item() != pytest.approx(math.sqrt(5 / 4))  # the population's


def test_leading_dimensions_are_kept() -> None:
    x, mask = torch.stack([X, 2 * X])[:, None], torch.stack([MASK, ~MASK])[:, None]
    sums = masked_sums(x, mask)
    assert sums.tolist() == [[[4.0, 10.0, 30.0]], [[1.0, 200.0, 40000.0]]]
    mean, std = mean_and_std(sums)
    assert mean.shape == std.shape == (2, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=20))
def test_equals_a_loop(entries: list[tuple[float, bool]]) -> None:
    valid = [x for x, is_valid in entries if is_valid]
    x, mask = torch.tensor([x for x, _ in entries]), torch.tensor([is_valid for _, is_valid in entries])
    mean, std = mean_and_std(masked_sums(x, mask))
    assert mean.item() == pytest.approx(statistics.fmean(valid) if valid else 0.0, abs=1e-9)
    expected = statistics.stdev(valid) if len(valid) > 1 else 1.0
    assert std.item() == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_sums_of_microbatches_give_the_minibatch() -> None:
    parts = [(X[:2], MASK[:2]), (X[2:], MASK[2:])]
    sums = torch.stack([masked_sums(x, mask) for x, mask in parts]).sum(0)
    whole = standardize(X[:4], *mean_and_std(sums))
    # -1.5, -0.5, 0.5, 1.5 over sqrt(5/3)
    expected = torch.tensor([-1.161895, -0.387298, 0.387298, 1.161895])
    assert_close(whole, expected, rtol=1e-5, atol=0)

    apart = torch.cat([standardize(x, *mean_and_std(masked_sums(x, mask))) for x, mask in parts])[:4]
    with pytest.raises(AssertionError, match="not close"):
        assert_close(apart, expected, rtol=1e-5, atol=0)


def test_entries_that_are_not_valid_are_not_read() -> None:
    x = X.masked_fill(~MASK, torch.nan)
    assert masked_sums(x, MASK).tolist() == [4.0, 10.0, 30.0]


@pytest.mark.parametrize(("valid", "mean"), [(0, 0.0), (1, 1.0)])
def test_spread_of_too_few_is_one(valid: int, mean: float) -> None:
    sums = masked_sums(X, torch.arange(5) < valid)
    assert [moment.item() for moment in mean_and_std(sums)] == [mean, 1.0]


@pytest.mark.parametrize("value", [0.1, -1e-3, 123456.7])
def test_equal_entries_standardize_to_zero(value: float) -> None:
    x = torch.full((1000,), value)
    mean, std = mean_and_std(masked_sums(x, torch.ones(1000, dtype=torch.bool)))
    assert not std.isnan()
    assert torch.equal(standardize(x, mean, std), torch.zeros(1000))


def test_rounding_below_zero_is_not_nan() -> None:
    # Σ² - (Σ)²/n = 29.999 - 30 < 0, as rounding may leave it
    _, std = mean_and_std(torch.tensor([3.0, math.sqrt(90.0), 29.999], dtype=torch.float64))
    assert std.item() == 0.0


def test_small_spread_around_a_large_mean_survives() -> None:
    x = 1e5 + torch.tensor([-1.0, 0.0, 1.0])
    _, std = mean_and_std(masked_sums(x, torch.ones(3, dtype=torch.bool)))
    assert std.item() == pytest.approx(1.0, rel=1e-5)


def test_standardize_keeps_the_dtype_of_the_advantages() -> None:
    moments = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    result = standardize(torch.tensor([[3.0, -1.0]]), *moments)
    assert result.dtype == torch.float32
    assert_close(result, torch.tensor([[1.0, -1.0]]))


def test_standardize_eps_bounds_the_scale() -> None:
    assert_close(
        standardize(torch.tensor([1.0]), torch.tensor(0.0), torch.tensor(0.0), eps=0.5), torch.tensor([2.0])
    )
