import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.rollout import finished_episodes

NEW = torch.zeros(2, 2, dtype=torch.float64)


def test_episodes_that_begin_and_end_within_a_rollout() -> None:
    rewards = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    done = torch.tensor([[False, False], [True, False], [False, True], [True, False]])
    returns, lengths, under_way = finished_episodes(rewards, torch.ones_like(done), done, NEW)
    assert returns.tolist() == [3.0, 70.0, 12.0]
    assert lengths.tolist() == [2.0, 3.0, 2.0]
    assert under_way.tolist() == [[0.0, 80.0], [0.0, 1.0]]


def test_an_episode_goes_on_over_a_rollout_without_an_end() -> None:
    rewards, never = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2, dtype=torch.bool)
    valid, under_way = ~never, NEW
    for _ in range(3):
        returns, _, under_way = finished_episodes(rewards, valid, never, under_way)
        assert returns.shape == (0,)
    returns, lengths, under_way = finished_episodes(rewards, valid, ~never, under_way)
    assert returns.tolist() == [4.0, 8.0]
    assert lengths.tolist() == [4.0, 4.0]
    assert under_way.eq(0.0).all()


def test_reset_steps_belong_to_no_episode() -> None:
    rewards = torch.tensor([[1.0], [torch.nan], [2.0], [3.0]])
    valid = torch.tensor([[True], [False], [True], [True]])
    done = torch.tensor([[True], [False], [False], [True]])
    returns, lengths, _ = finished_episodes(rewards, valid, done, NEW[:, :1])
    assert returns.tolist() == [1.0, 5.0]
    assert lengths.tolist() == [1.0, 2.0]
    counted, _, _ = finished_episodes(rewards.nan_to_num(7.0), torch.ones_like(valid), done, NEW[:, :1])
    assert counted.tolist() == [1.0, 12.0], "the mask is what keeps them out"


def test_a_small_return_is_not_lost_beside_large_ones() -> None:
    rewards = torch.tensor([[1e8], [0.25], [1e8], [0.5]])
    done = torch.ones(4, 1, dtype=torch.bool)
    returns, _, _ = finished_episodes(rewards, done, done, NEW[:, :1])
    assert returns.tolist() == [1e8, 0.25, 1e8, 0.5]
    assert rewards.cumsum(0).diff(dim=0)[0].item() == 0.0, "running sums in float32 lose it"


def one_by_one(rewards: Tensor, valid: Tensor, done: Tensor) -> tuple[list[float], list[float]]:
    returns, lengths = [], []
    totals = [[0.0, 0] for _ in range(rewards.shape[1])]
    for t in range(rewards.shape[0]):
        for n, total in enumerate(totals):
            if valid[t, n]:
                total[0] += rewards[t, n].item()
                total[1] += 1
            if done[t, n]:
                returns.append(total[0])
                lengths.append(total[1])
                totals[n] = [0.0, 0]
    return returns, lengths


@settings(max_examples=80, deadline=None)
@given(
    horizons=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_envs=st.integers(1, 4),
    end_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    with_reset_steps=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_a_loop_over_single_steps_however_they_are_cut_into_rollouts(
    horizons: list[int], num_envs: int, end_share: float, with_reset_steps: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(horizons)
    rewards = torch.randn(total, num_envs, generator=generator)
    done = torch.rand(total, num_envs, generator=generator) < end_share
    valid = torch.ones_like(done)
    if with_reset_steps:
        for t in range(1, total):
            valid[t] = ~done[t - 1]
            done[t] &= valid[t]
    carry = torch.zeros(2, num_envs, dtype=torch.float64)
    returns, lengths = [], []
    begin = 0
    for horizon in horizons:
        part = slice(begin, begin + horizon)
        some_returns, some_lengths, carry = finished_episodes(rewards[part], valid[part], done[part], carry)
        begin += horizon
        returns.append(some_returns)
        lengths.append(some_lengths)
    expected_returns, expected_lengths = one_by_one(rewards, valid, done)
    assert_close(torch.cat(returns), torch.tensor(expected_returns, dtype=torch.float64))
    assert torch.cat(lengths).tolist() == expected_lengths
