from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from torch.utils._pytree import tree_map

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    MaskedObservations,
    ObservationNormalizer,
    RewardNormalizer,
    make_policy,
)
from puffer_lightning.policies.nesting import leaf_spaces, select
from puffer_lightning.policies.normalization import RunningMoments
from tests.distributed.processes import run_ranks
from tests.policies.nested_spaces import OBSERVATION_SPACES, batch

BOX = spaces.Box(-np.inf, np.inf, (3,))
ALL = torch.ones(8, 4, dtype=torch.bool)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments_of(*parts: torch.Tensor) -> RunningMoments:
    moments = RunningMoments(parts[0].shape[1])
    for part in parts:
        moments.update(part, torch.ones(len(part), dtype=torch.bool))
    return moments


class TestRunningMoments:
    @pytest.mark.parametrize("offset", [0.0, 1e9])
    def test_agree_with_those_of_everything_at_once(self, offset: float) -> None:
        samples = torch.randn(1000, 3, generator=generator(), dtype=torch.float64) * 0.5 + offset
        moments = moments_of(*samples.split([1, 499, 0, 500]))
        assert moments.count == 1000
        torch.testing.assert_close(moments.mean, samples.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.std, samples.std(0, correction=0), rtol=1e-7, atol=0)

    def test_invalid_samples_are_not_read(self) -> None:
        samples = torch.randn(8, 4, 3, generator=generator())
        valid = torch.rand(8, 4, generator=generator(1)) < 0.7
        moments = RunningMoments(3)
        moments.update(samples.masked_fill(~valid[..., None], torch.nan), valid)
        assert moments.count == valid.sum()
        torch.testing.assert_close(moments.mean, samples[valid].double().mean(0))
        torch.testing.assert_close(moments.std, samples[valid].double().std(0, correction=0))

    @pytest.mark.parametrize("value", [0.0, 0.1, 1e9])
    def test_without_spread_the_deviation_is_1(self, value: float) -> None:
        assert moments_of(torch.full((7, 1), value), torch.full((50, 1), value)).std.item() == 1.0
        assert RunningMoments(1).std.item() == 1.0

    def test_a_small_spread_is_kept(self) -> None:
        assert moments_of(torch.tensor([[1e-9], [-1e-9]])).std.item() == pytest.approx(1e-9)

    def test_counts_go_beyond_what_floats_can_tell_apart(self) -> None:
        moments = RunningMoments(1)
        moments.count.fill_(2**60)
        moments.update(torch.ones(3, 1), torch.ones(3, dtype=torch.bool))
        assert moments.count.dtype == torch.int64
        assert moments.count.item() == 2**60 + 3

    def test_converting_a_module_does_not_round_them(self) -> None:
        moments = moments_of(torch.tensor([[1.2345678901234567]], dtype=torch.float64))
        before = {name: buffer.clone() for name, buffer in moments.named_buffers()}
        torch.nn.Sequential(moments).bfloat16()
        for name, buffer in moments.named_buffers():
            assert buffer.dtype == before[name].dtype, name
            assert torch.equal(buffer, before[name]), name


class TestObservationNormalizer:
    @given(OBSERVATION_SPACES)
    @settings(max_examples=40, deadline=None)
    def test_each_box_gets_mean_0_and_deviation_1_and_nothing_else_changes(
        self, space: gym.Space[Any]
    ) -> None:
        observations = tree_map(lambda leaf: leaf.unflatten(0, (8, 4)), batch(space, 32))
        boxes = {
            path
            for path, leaf in leaf_spaces(space).items()
            if isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8
        }
        if not boxes:
            with pytest.raises(ConfigurationError, match="normalize_observations"):
                ObservationNormalizer(space)
            return
        normalizer = ObservationNormalizer(space)
        normalizer.update(observations, ALL)
        normalized = normalizer(observations)
        for path in leaf_spaces(space):
            before, after = select(observations, path), select(normalized, path)
            if path not in boxes:
                assert after is before
                continue
            expected = before.double() - before.double().mean((0, 1))
            deviation = before.double().std((0, 1), correction=0)
            expected /= deviation.where(deviation > 0, 1.0)
            torch.testing.assert_close(after, expected.float(), rtol=1e-3, atol=1e-3)

    def test_before_the_first_update_nothing_is_shifted_or_scaled(self) -> None:
        assert ObservationNormalizer(BOX)(torch.tensor([1.0, -2.0, 3.0])).tolist() == [1.0, -2.0, 3.0]

    def test_outliers_are_clipped_to_10_deviations(self) -> None:
        normalizer = ObservationNormalizer(BOX)
        normalizer.update(torch.randn(8, 4, 3, generator=generator()), ALL)
        assert normalizer(torch.tensor([1e6, -1e6, 0.0]))[:2].tolist() == [10.0, -10.0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
    def test_large_values_keep_the_digits_that_their_dtype_has(self, dtype: torch.dtype) -> None:
        space = spaces.Box(-np.inf, np.inf, (), np.float64)
        samples = (10**12 + torch.arange(32).reshape(8, 4)).to(dtype)
        normalizer = ObservationNormalizer(space)
        for _ in range(2):
            normalizer.update(samples, ALL)
        expected = (torch.arange(32.0) - 15.5) / torch.arange(32.0).std(correction=0)
        torch.testing.assert_close(normalizer(samples).flatten(), expected)

    def test_a_mask_is_left_out(self) -> None:
        space = spaces.Dict(x=BOX, action_mask=spaces.Box(0, 1, (2,), np.int8))
        normalizer = ObservationNormalizer(space)
        assert normalizer.moments.mean.shape == (3,)
        x = torch.randn(8, 4, 3, generator=generator()) + 5
        normalizer.update(MaskedObservations({"x": x}, torch.ones(8, 4, 2, dtype=torch.bool)), ALL)
        assert normalizer({"x": x})["x"].mean().abs() < 1e-5

    def test_a_policy_sees_normalised_observations_and_saves_the_statistics(self) -> None:
        policy = make_policy(BOX, spaces.Discrete(2))
        x = torch.randn(8, 4, 3, generator=generator()) * 7 + 5
        plain = policy.value(x[0])
        policy.observation_normalizer = normalizer = ObservationNormalizer(BOX)
        normalizer.update(x, ALL)
        assert not torch.equal(policy.value(x[0]), plain)
        assert torch.equal(policy.value(x[0]), policy(normalizer(x[0]))[1])
        other = make_policy(BOX, spaces.Discrete(2))
        other.observation_normalizer = ObservationNormalizer(BOX)
        other.load_state_dict(policy.state_dict())
        assert torch.equal(other.value(x[0]), policy.value(x[0]))

    def test_using_it_changes_no_statistics(self) -> None:
        normalizer = ObservationNormalizer(BOX)
        normalizer.update(torch.randn(8, 4, 3, generator=generator()), ALL)
        before = {name: buffer.clone() for name, buffer in normalizer.named_buffers()}
        normalizer(100 * torch.randn(8, 4, 3))
        assert all(torch.equal(before[name], buffer) for name, buffer in normalizer.named_buffers())


def test_rewards_are_scaled_by_the_spread_of_returns_and_not_shifted_or_clipped() -> None:
    normalizer = RewardNormalizer()
    returns = 3 * torch.randn(8, 4, generator=generator(), dtype=torch.float64) + 40
    normalizer.update(returns, ALL)
    rewards = torch.tensor([[0.0, -2.0, 1e9]])
    scaled = normalizer(rewards)
    assert scaled.dtype == rewards.dtype
    torch.testing.assert_close(scaled, rewards / returns.std(correction=0).float())


SPACE = spaces.Dict(a=BOX, b=spaces.Box(-1.0, 1.0, (2, 2)))


def statistics_of_a_rank(rank: int) -> dict[str, Any]:
    normalizer = ObservationNormalizer(SPACE)
    for iteration in range(3):
        normalizer.update(*rank_samples(iteration, rank))
    return {name: buffer.numpy().copy() for name, buffer in normalizer.named_buffers()}


def rank_samples(iteration: int, *ranks: int) -> tuple[Any, torch.Tensor]:
    draw = generator(iteration)
    a, b = torch.randn(8, 4, 3, generator=draw) + 3, torch.rand(8, 4, 2, 2, generator=draw)
    valid = torch.rand(8, 4, generator=draw) < torch.linspace(0.3, 1.0, 4)
    columns = [2 * rank + column for rank in ranks for column in range(2)]
    return tree_map(lambda leaf: leaf[:, columns], {"a": a, "b": b}), valid[:, columns]


def test_two_ranks_have_the_statistics_of_one_that_sees_everything() -> None:
    one, other = run_ranks(statistics_of_a_rank)
    whole = ObservationNormalizer(SPACE)
    for iteration in range(3):
        whole.update(*rank_samples(iteration, 0, 1))
    for name, buffer in whole.named_buffers():
        np.testing.assert_array_equal(one[name], other[name])
        np.testing.assert_allclose(one[name], buffer.numpy(), rtol=1e-12)
