import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical

from puffer_lightning.policies import CategoricalHead, MultiCategoricalHead
from puffer_lightning.policies.categorical import fill_gumbel

NVEC = [3, 5, 2]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise_for(head: CategoricalHead | MultiCategoricalHead, count: int) -> torch.Tensor:
    noise = torch.empty(count, head.noise_size)
    head.fill_noise(noise, generator())
    return noise


def multi_head(nvec: list[int] | list[list[int]] = NVEC) -> tuple[MultiCategoricalHead, torch.Tensor]:
    head = MultiCategoricalHead(6, spaces.MultiDiscrete(nvec))
    return head, 2 * torch.randn(40, head.noise_size, generator=generator(1))


def factors(params: torch.Tensor) -> list[Categorical]:
    """The oracle: one torch distribution a factor, in float64, without the padding."""
    largest = max(NVEC)
    return [Categorical(logits=params[:, k * largest : k * largest + n].double()) for k, n in enumerate(NVEC)]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


class TestGumbel:
    def test_has_the_moments_of_the_standard_gumbel_distribution(self) -> None:
        noise = torch.empty(200_000)
        fill_gumbel(noise, generator())
        assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
        assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
        assert noise.isfinite().all()

    def test_is_a_function_of_the_generator(self) -> None:
        first, second, other = torch.empty(7), torch.empty(7), torch.empty(7)
        fill_gumbel(first, generator(3))
        fill_gumbel(second, generator(3))
        fill_gumbel(other, generator(4))
        assert torch.equal(first, second)
        assert not torch.equal(first, other)


class TestCategorical:
    def test_evaluate_agrees_with_torch(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(5))
        params = 3 * torch.randn(50, 5, generator=generator())
        actions = torch.randint(5, (50,), generator=generator(1))
        oracle = Categorical(logits=params.double())
        log_probs, entropies = head.evaluate(params, actions)
        torch.testing.assert_close(log_probs.double(), oracle.log_prob(actions), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(entropies.double(), oracle.entropy(), rtol=1e-5, atol=1e-6)

    def test_sample_frequencies_are_the_probabilities(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(4))
        probs = torch.tensor([0.05, 0.15, 0.3, 0.5])
        count = 40_000
        # Parameters are logits up to a constant, hence the shift.
        actions, log_probs = head.sample((probs.log() + 7).expand(count, 4), noise_for(head, count))
        counts = actions.bincount(minlength=4)
        # 0.9999 quantile of chi-square with 3 degrees of freedom is 21; uniform sampling gives thousands.
        assert chi_square(counts, probs) < 21
        assert chi_square(torch.full((4,), count // 4), probs) > 1000
        torch.testing.assert_close(log_probs, probs.log()[actions], rtol=0, atol=1e-5)

    def test_samples_are_stored_as_int64_scalars_from_0(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(3, start=10))
        actions, _ = head.sample(torch.zeros(2, 9, 3), noise_for(head, 18).reshape(2, 9, 3))
        assert actions.dtype == head.action_dtype == torch.int64
        assert head.action_shape == ()
        assert actions.shape == (2, 9)
        assert set(actions.flatten().tolist()) <= {0, 1, 2}

    def test_sampling_is_a_function_of_the_row(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(5))
        params, noise = torch.randn(8, 5, generator=generator()), noise_for(head, 8)
        together, _ = head.sample(params, noise)
        alone = [head.sample(params[i], noise[i])[0] for i in range(8)]
        assert torch.equal(together, torch.stack(alone))

    def test_sampled_and_evaluated_log_probs_are_equal_bit_for_bit(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(5))
        params = torch.randn(64, 5, generator=generator())
        actions, log_probs = head.sample(params, noise_for(head, 64))
        assert torch.equal(log_probs, head.evaluate(params, actions)[0])

    def test_mode_is_the_most_probable_action(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(3))
        assert head.mode(torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 0.0]])).tolist() == [1, 0]

    @pytest.mark.parametrize("dtype", [np.int64, np.int32])
    def test_to_env_adds_start_in_the_dtype_of_the_space(self, dtype: type[np.integer]) -> None:
        space = spaces.Discrete(3, start=-1, dtype=dtype)
        given = CategoricalHead(6, space).to_env(torch.tensor([0, 1, 2]))
        assert given.tolist() == [-1, 0, 1]
        assert given.numpy().dtype == dtype
        assert all(space.contains(action) for action in given.numpy())

    def test_results_are_float32_for_bfloat16_parameters(self) -> None:
        head = CategoricalHead(6, spaces.Discrete(5))
        params = torch.randn(16, 5, generator=generator()).bfloat16()
        actions, sampled = head.sample(params, noise_for(head, 16))
        log_probs, entropies = head.evaluate(params, actions)
        assert sampled.dtype == log_probs.dtype == entropies.dtype == torch.float32
        torch.testing.assert_close(entropies.double(), Categorical(logits=params.double()).entropy())

    def test_entropy_and_gradient_stay_finite_for_a_certain_action(self) -> None:
        params = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
        log_probs, entropies = CategoricalHead(6, spaces.Discrete(3)).evaluate(params, torch.tensor([0]))
        (log_probs + entropies).sum().backward()
        assert entropies.item() == 0
        assert params.grad is not None
        assert params.grad.isfinite().all()


class TestMultiCategorical:
    def test_evaluate_agrees_with_torch(self) -> None:
        head, params = multi_head()
        actions = torch.stack([torch.randint(n, (40,), generator=generator(n)) for n in NVEC], -1)
        log_probs, entropies = head.evaluate(params, actions)
        oracle = factors(params)
        expected = sum(d.log_prob(a) for d, a in zip(oracle, actions.unbind(-1), strict=True))
        torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
        expected = sum(d.entropy() for d in oracle)
        torch.testing.assert_close(entropies.double(), expected, rtol=1e-5, atol=1e-5)

    def test_sample_frequencies_are_the_joint_probabilities(self) -> None:
        head, params = multi_head()
        count = 60_000
        actions, _ = head.sample(params[:1].expand(count, -1), noise_for(head, count))
        # All joint actions: the product also catches factors that share noise.
        index = (actions[:, 0] * NVEC[1] + actions[:, 1]) * NVEC[2] + actions[:, 2]
        first, second, third = (d.probs[0] for d in factors(params[:1]))
        probs = torch.einsum("i,j,k->ijk", first, second, third).flatten()
        # 29 degrees of freedom: the 0.9999 quantile is 67.
        assert chi_square(index.bincount(minlength=30), probs) < 67

    def test_padding_is_never_chosen(self) -> None:
        head, params = multi_head()
        limit = torch.tensor(NVEC)
        pushed = params.reshape(40, 3, 5).masked_fill(torch.arange(5) >= limit[:, None], 100.0).flatten(1)
        actions, log_probs = head.sample(pushed, noise_for(head, 40))
        assert (actions < limit).all()
        assert (head.mode(pushed) < limit).all()
        assert log_probs.isfinite().all()
        assert head.evaluate(pushed, actions)[1].isfinite().all()

    def test_sampled_and_evaluated_log_probs_are_equal_bit_for_bit(self) -> None:
        head, params = multi_head()
        actions, log_probs = head.sample(params, noise_for(head, 40))
        assert torch.equal(log_probs, head.evaluate(params, actions)[0])

    def test_mode_is_the_most_probable_action_of_each_factor(self) -> None:
        head, params = multi_head()
        expected = torch.stack([d.probs.argmax(-1) for d in factors(params)], -1)
        assert torch.equal(head.mode(params), expected)

    def test_actions_of_a_matrix_space_keep_its_shape(self) -> None:
        head, params = multi_head([[2, 3], [4, 2]])
        actions, log_probs = head.sample(params, noise_for(head, 40))
        assert head.action_shape == (2, 2)
        assert actions.shape == head.mode(params).shape == (40, 2, 2)
        assert log_probs.shape == (40,)
        torch.testing.assert_close(head.evaluate(params, actions)[0], log_probs)

    def test_to_env_adds_start_in_the_dtype_of_the_space(self) -> None:
        space = spaces.MultiDiscrete([2, 3], start=[5, -2], dtype=np.int32)
        given = MultiCategoricalHead(6, space).to_env(torch.tensor([[0, 0], [1, 2]]))
        assert given.tolist() == [[5, -2], [6, 0]]
        assert all(space.contains(action) for action in given.numpy())

    def test_gradients_are_finite_and_zero_on_the_padding(self) -> None:
        head, params = multi_head()
        params.requires_grad_()
        log_probs, entropies = head.evaluate(params, torch.zeros(40, 3, dtype=torch.int64))
        (log_probs + entropies).sum().backward()
        assert params.grad is not None
        padding = torch.arange(5) >= torch.tensor(NVEC)[:, None]
        gradient = params.grad.reshape(40, 3, 5)
        assert gradient.isfinite().all()
        assert (gradient[:, padding] == 0).all()
        assert (gradient[:, ~padding] != 0).any(0).all()
