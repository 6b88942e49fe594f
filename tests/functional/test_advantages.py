"""Hand-worked advantages; `tests/equivalence/test_gae_oracle.py` compares with a loop on random rollouts."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.functional import gae, running_returns

# Three environments over four steps with γ = λ = ½, so γλ = ¼; every reward is 1. The episode of the second
# terminates at t = 1, that of the third is truncated there with a final observation worth 20, not the 6 of
# the observation after the reset.
GAMMA, LAMBDA = 0.5, 0.5
REWARDS = torch.ones(4, 3, dtype=torch.float64)
VALUES = torch.tensor([2.0, 4.0, 6.0, 8.0], dtype=torch.float64)[:, None].expand(4, 3)
NEXT_VALUES = torch.tensor(
    [[4.0, 4.0, 4.0], [6.0, 6.0, 20.0], [8.0, 8.0, 8.0], [10.0, 10.0, 10.0]], dtype=torch.float64
)
NEVER = torch.zeros(4, 3, dtype=torch.bool)
TERMINATED, TRUNCATED = NEVER.clone(), NEVER.clone()
TERMINATED[1, 1] = True
TRUNCATED[1, 2] = True

EXPECTED = torch.tensor(
    [
        # δ_0 = 1 + ½·4 - 2 = 1 in all three
        # 1 + ¼·-0.375      1 + ¼·-3  1 + ¼·7
        [0.90625, 0.25, 2.75],
        # δ_1 = 1 + ½·6 - 4 = 0, 1 - 4 = -3 (no future), 1 + ½·20 - 4 = 7
        # 0 + ¼·-1.5        -3        7: the end cuts what follows off
        [-0.375, -3.0, 7.0],
        # δ_2 = 1 + ½·8 - 6 = -1
        # -1 + ¼·-2 in all three
        [-1.5, -1.5, -1.5],
        # δ_3 = 1 + ½·10 - 8 = -2, and nothing follows the last row
        [-2.0, -2.0, -2.0],
    ],
    dtype=torch.float64,
)

MISTAKES = {
    "truncation taken for termination": (NEXT_VALUES, TERMINATED | TRUNCATED, NEVER),
    "truncation does not cut": (NEXT_VALUES, TERMINATED, NEVER),
    "termination bootstraps": (NEXT_VALUES, NEVER, TERMINATED | TRUNCATED),
    "value of the observation after the reset": (
        torch.cat([VALUES[1:], NEXT_VALUES[-1:]]),
        TERMINATED,
        TRUNCATED,
    ),
    "this step's value as the next one": (VALUES, TERMINATED, TRUNCATED),
    "the next row's flags": (NEXT_VALUES, TERMINATED.roll(-1, 0), TRUNCATED.roll(-1, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hand_worked_rollout(dtype: torch.dtype) -> None:
    advantages = gae(
        REWARDS.to(dtype), VALUES.to(dtype), NEXT_VALUES.to(dtype), TERMINATED, TRUNCATED, GAMMA, LAMBDA
    )
    # Every number is a short binary fraction, so the result is exact.
    assert_close(advantages, EXPECTED.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_hand_worked_rollout_tells_mistakes_apart(mistake: str) -> None:
    advantages = gae(REWARDS, VALUES, *MISTAKES[mistake], GAMMA, LAMBDA)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(advantages, EXPECTED)


def test_lambda_zero_is_the_temporal_difference_and_one_is_the_discounted_return() -> None:
    td = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, GAMMA, 0.0)
    assert_close(td[:, 0], torch.tensor([1.0, 0.0, -1.0, -2.0], dtype=torch.float64))
    # 1 + ½ + ¼ + ⅛ + ½⁴·10 = 2.5, less V_0 = 2
    full = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, GAMMA, 1.0)
    assert full[0, 0] == 0.5


def test_both_flags_mean_termination() -> None:
    both = gae(REWARDS, VALUES, NEXT_VALUES, TERMINATED, TERMINATED, GAMMA, LAMBDA)
    assert_close(both[:, 1], EXPECTED[:, 1])


@pytest.mark.parametrize("anything", [float("nan"), float("inf")])
def test_next_value_of_a_terminated_step_is_not_read(anything: float) -> None:
    next_values = NEXT_VALUES.masked_fill(TERMINATED, anything)
    assert_close(gae(REWARDS, VALUES, next_values, TERMINATED, TRUNCATED, GAMMA, LAMBDA), EXPECTED)
    # Multiplying by the flag instead would let it through.
    assert not torch.isfinite(next_values * ~TERMINATED).all()


@pytest.mark.parametrize("garbage", [7.0, float("nan")])
def test_a_lost_transition_tells_nothing(garbage: float) -> None:
    """The third environment's is lost at t = 1: the step before it ends there, in V of what it led to."""
    valid = ~NEVER
    valid[1, 2] = False
    rewards, values = REWARDS.where(valid, garbage), VALUES.where(valid, garbage)
    expected = EXPECTED.clone()
    # δ_0 alone, without ¼·7; then what was lost
    expected[:2, 2] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = gae(rewards, values, NEXT_VALUES, TERMINATED, TRUNCATED, GAMMA, LAMBDA, valid=valid)
    assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("ended_by", ["terminated", "truncated"])
def test_reset_step_reaches_no_other_row(ended_by: str) -> None:
    """NEXT_STEP autoreset: an episode ends at t = 1, row 2 is the reset step, row 3 begins a new episode."""
    real_rows = [0, 1, 3, 4]
    ended = torch.tensor([False, True, False, False, False])[:, None]
    never = torch.zeros_like(ended)

    def advantages(garbage: float, ended: Tensor = ended, rows: list[int] | slice = slice(None)) -> Tensor:
        rewards = torch.tensor([1.0, 2.0, garbage, 3.0, 4.0])[rows, None]
        values = torch.tensor([0.5, 1.5, -garbage, 3.5, 4.5])[rows, None]
        next_values = torch.tensor([1.5, 2.5, garbage, 4.5, 5.5])[rows, None]
        flags = (ended[rows], never[rows]) if ended_by == "terminated" else (never[rows], ended[rows])
        return gae(rewards, values, next_values, *flags, 0.9, 0.8)

    assert torch.equal(advantages(0.0)[real_rows], advantages(1e3)[real_rows])
    # Without the reset step (SAME_STEP autoreset) the episodes are the same, and so are the advantages.
    assert torch.equal(advantages(1e3)[real_rows], advantages(0.0, rows=real_rows))
    # With the flag one row late, on the reset step itself, the garbage would reach the episode before it.
    late = ended.roll(1, 0)
    assert not torch.equal(advantages(0.0, late)[real_rows], advantages(1e3, late)[real_rows])


@pytest.mark.parametrize("alias", ["fresh", "rewards", "values", "next_values"])
def test_out_is_filled_and_returned(alias: str) -> None:
    inputs = {"rewards": REWARDS.clone(), "values": VALUES.clone(), "next_values": NEXT_VALUES.clone()}
    out = inputs.get(alias, torch.full((4, 3), torch.nan, dtype=torch.float64))
    result = gae(
        **inputs, terminated=TERMINATED, truncated=TRUNCATED, gamma=GAMMA, gae_lambda=LAMBDA, out=out
    )
    assert result is out
    assert_close(out, EXPECTED)


def test_inputs_are_left_alone_and_no_gradient_is_recorded() -> None:
    inputs = (REWARDS.clone(), VALUES.clone().requires_grad_(), NEXT_VALUES.clone().requires_grad_())
    advantages = gae(*inputs, TERMINATED, TRUNCATED, GAMMA, LAMBDA)
    assert not advantages.requires_grad
    for given, original in zip(inputs, (REWARDS, VALUES, NEXT_VALUES), strict=True):
        assert torch.equal(given, original)


class TestRunningReturns:
    def test_sums_start_anew_with_each_episode_and_carry_over(self) -> None:
        nan = torch.nan
        rewards = torch.tensor([[1.0, 1.0], [2.0, nan], [4.0, 2.0], [8.0, 4.0]])
        valid = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool()
        ended = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 1]]).bool()
        returns, carry = running_returns(rewards, valid, ended, 0.5, torch.tensor([10.0, 0.0]).double())
        # The second environment resets at its second step.
        expected = torch.tensor([[11.0, 1.0], [7.5, 0.0], [4.0, 2.0], [10.0, 5.0]])
        assert_close(returns, expected.double(), rtol=0, atol=0)
        assert carry.tolist() == [5.0, 0.0]
        assert rewards[0, 0] == 1.0

    @pytest.mark.parametrize("num_envs", [5, 4096])
    def test_two_rollouts_in_a_row_are_one(self, num_envs: int) -> None:
        generator, gamma = torch.Generator().manual_seed(0), 0.5
        # Every number is a short binary fraction, so the sums are exact in whatever order.
        rewards = torch.randint(-9, 10, (12, num_envs), generator=generator).float()
        ended = torch.rand(12, num_envs, generator=generator) < 0.2
        valid, start = torch.ones_like(ended), torch.zeros(num_envs, dtype=torch.float64)
        whole, _ = running_returns(rewards, valid, ended, gamma, start)
        first, carry = running_returns(rewards[:7], valid[:7], ended[:7], gamma, start)
        second, _ = running_returns(rewards[7:], valid[7:], ended[7:], gamma, carry)
        assert torch.equal(torch.cat((first, second)), whole)

    @pytest.mark.parametrize("num_envs", [3, 4096])
    def test_equals_the_formula_step_by_step(self, num_envs: int) -> None:
        """Few are summed in passes over all steps, many step by step."""
        generator = torch.Generator().manual_seed(0)
        rewards, start = torch.randn(2, 13, num_envs, generator=generator).double().unbind()
        ended, valid = (
            torch.rand(2, 13, num_envs, generator=generator) < torch.tensor([0.2, 0.9])[:, None, None]
        )
        expected, carry = torch.empty_like(rewards), start[0]
        for t in range(13):
            expected[t] = rewards[t] * valid[t] + carry
            carry = 0.9 * expected[t] * ~ended[t]
        returns, after = running_returns(rewards, valid, ended, 0.9, start[0])
        assert_close(returns, expected, rtol=0, atol=1e-14)
        assert_close(after, carry, rtol=0, atol=1e-14)
