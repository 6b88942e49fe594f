import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import GaussianHead, SquashedGaussianHead
from puffer_lightning.policies.gaussian import log_tanh_derivative

LOW, HIGH = [-2.0, 0.0, 10.0], [2.0, 0.5, 11.0]
SPACE = spaces.Box(np.float32(LOW), np.float32(HIGH))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_params(count: int = 50) -> torch.Tensor:
    mean = torch.randn(count, 3, generator=generator(1))
    log_std = torch.tensor([-1.0, 0.0, 0.5]).expand(count, 3)
    return torch.cat((mean, log_std), -1)


def noise_for(head: GaussianHead, count: int) -> torch.Tensor:
    noise = torch.empty(count, head.noise_size)
    head.fill_noise(noise, generator())
    return noise


def normal(params: torch.Tensor) -> Independent:
    mean, log_std = params.double().chunk(2, -1)
    return Independent(Normal(mean, log_std.exp()), 1)


def squashed(params: torch.Tensor) -> TransformedDistribution:
    low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
    scale = AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)
    return TransformedDistribution(normal(params), [TanhTransform(), scale])


class TestGaussian:
    def test_forward_gives_the_mean_and_the_trained_log_std(self) -> None:
        head = GaussianHead(4, SPACE, log_std_init=-0.5)
        features = torch.randn(5, 4, generator=generator())
        mean, log_std = head(features).chunk(2, -1)
        torch.testing.assert_close(mean, features @ head.linear.weight.T)
        assert (log_std == -0.5).all()
        assert "log_std" in dict(head.named_parameters())

    def test_evaluate_agrees_with_torch(self) -> None:
        params, head = make_params(), GaussianHead(4, SPACE)
        actions = torch.randn(50, 3, generator=generator(2))
        log_probs, entropies = head.evaluate(params, actions)
        oracle = normal(params)
        torch.testing.assert_close(
            log_probs.double(), oracle.log_prob(actions.double()), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(entropies.double(), oracle.entropy(), rtol=1e-5, atol=1e-5)

    def test_samples_have_the_moments_of_the_distribution(self) -> None:
        head, count = GaussianHead(4, SPACE), 40_000
        params = make_params(1)
        actions, _ = head.sample(params.expand(count, -1), noise_for(head, count))
        mean, log_std = params[0].chunk(2, -1)
        error = (actions.mean(0) - mean) / (log_std.exp() / count**0.5)
        assert (error.abs() < 5).all()
        torch.testing.assert_close(actions.std(0), log_std.exp(), rtol=0.03, atol=0)
        assert torch.corrcoef(actions.T).triu(1).abs().max() < 0.03

    def test_sampled_and_evaluated_log_probs_are_equal_bit_for_bit(self) -> None:
        head, params = GaussianHead(4, SPACE), make_params()
        actions, log_probs = head.sample(params, noise_for(head, 50))
        assert torch.equal(log_probs, head.evaluate(params, actions)[0])

    def test_stores_the_sample_unclipped_and_gives_the_environment_a_clipped_one(self) -> None:
        head = GaussianHead(4, SPACE)
        actions, _ = head.sample(make_params(), noise_for(head, 50))
        given = head.to_env(actions)
        assert (actions != given).any(0).all()
        assert all(SPACE.contains(action) for action in given.numpy())
        inside = torch.tensor([[1.5, 0.25, 10.5]])
        assert torch.equal(head.to_env(inside), inside)

    def test_unbounded_spaces_are_not_clipped(self) -> None:
        head = GaussianHead(4, spaces.Box(-np.inf, np.inf, (3,)))
        actions = torch.tensor([[1e6, -1e6, 0.0]])
        assert torch.equal(head.to_env(actions), actions)

    def test_samples_carry_no_gradient_but_their_log_probs_do(self) -> None:
        head, params = GaussianHead(4, SPACE), make_params().requires_grad_()
        actions, log_probs = head.sample(params, noise_for(head, 50))
        (sampled,) = torch.autograd.grad(log_probs.sum(), params)
        (evaluated,) = torch.autograd.grad(head.evaluate(params, actions)[0].sum(), params)
        assert not actions.requires_grad
        assert sampled[:, :3].any()
        torch.testing.assert_close(sampled, evaluated)

    def test_mode_is_the_mean(self) -> None:
        params = make_params()
        assert torch.equal(GaussianHead(4, SPACE).mode(params), params[:, :3])

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
    def test_actions_of_any_shape(self, shape: tuple[int, ...]) -> None:
        space = spaces.Box(-1.0, 1.0, shape)
        head = GaussianHead(4, space)
        params = head(torch.randn(5, 7, 4, generator=generator()))
        noise = noise_for(head, 35).reshape(5, 7, -1)
        actions, log_probs = head.sample(params, noise)
        assert actions.shape == head.mode(params).shape == head.to_env(actions).shape == (5, 7, *shape)
        assert actions.dtype == head.action_dtype == torch.float32
        assert log_probs.shape == (5, 7)
        assert torch.equal(head.evaluate(params, actions)[0], log_probs)

    def test_bounds_keep_the_precision_of_the_space(self) -> None:
        space = spaces.Box(-0.1, 0.1, (2,), np.float64)
        head = GaussianHead(4, space).bfloat16()
        given = head.to_env(torch.tensor([5.0, -5.0]))
        assert given.dtype == torch.float64
        assert given.tolist() == [0.1, -0.1]

    def test_results_are_float32_for_bfloat16_parameters(self) -> None:
        head, params = GaussianHead(4, SPACE), make_params().bfloat16()
        actions, sampled = head.sample(params, noise_for(head, 50))
        log_probs, entropies = head.evaluate(params, actions)
        assert actions.dtype == sampled.dtype == log_probs.dtype == entropies.dtype == torch.float32
        torch.testing.assert_close(log_probs.double(), normal(params).log_prob(actions.double()))

    def test_integer_boxes_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="holds integers"):
            GaussianHead(4, spaces.Box(0, 5, (2,), np.int32))


class TestSquashedGaussian:
    def test_log_tanh_derivative_is_right_and_finite(self) -> None:
        u = torch.linspace(-5, 5, 41, dtype=torch.float64)
        torch.testing.assert_close(log_tanh_derivative(u), (1 - u.tanh() ** 2).log())
        far = torch.tensor([-200.0, 200.0], requires_grad=True)
        result = log_tanh_derivative(far)
        result.sum().backward()
        assert far.grad is not None
        torch.testing.assert_close(result.detach(), torch.full((2,), 2 * np.log(2.0) - 400).float())
        assert far.grad.tolist() == [2.0, -2.0]

    def test_log_probs_are_the_density_of_what_the_environment_is_given(self) -> None:
        head, params = SquashedGaussianHead(4, SPACE), make_params()
        u = torch.randn(50, 3, generator=generator(2))
        low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
        given = low + (high - low) * (u.double().tanh() + 1) / 2
        torch.testing.assert_close(head.to_env(u).double(), given, rtol=0, atol=1e-5)
        log_probs, _ = head.evaluate(params, u)
        expected = squashed(params).log_prob(given)
        torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-4)

    def test_sampled_and_evaluated_log_probs_are_equal_bit_for_bit(self) -> None:
        head, params = SquashedGaussianHead(4, SPACE), make_params()
        actions, log_probs = head.sample(params, noise_for(head, 50))
        assert torch.equal(log_probs, head.evaluate(params, actions)[0])

    def test_entropy_agrees_with_monte_carlo(self) -> None:
        head, params, count = SquashedGaussianHead(4, SPACE), make_params(8), 20_000
        samples = normal(params).sample((count,)).float()
        log_probs, _ = head.evaluate(params.expand(count, -1, -1), samples)
        _, entropies = head.evaluate(params, torch.zeros(8, 3))
        standard_error = log_probs.std(0) / count**0.5
        # Without the Jacobian, or without the scale of the bounds, the error is hundreds of standard errors.
        assert ((entropies + log_probs.mean(0)).abs() < 5 * standard_error + 2e-3).all()

    @pytest.mark.parametrize("log_std", [-3.0, 0.0, 1.0])
    def test_entropy_agrees_with_dense_integration(self, log_std: float) -> None:
        head = SquashedGaussianHead(4, spaces.Box(-1.0, 1.0, (1,)))
        z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
        weights = (-0.5 * z**2).exp()
        u = 0.7 + np.exp(log_std) * z
        jacobian = (weights * log_tanh_derivative(u)).sum() / weights.sum()
        expected = 0.5 + 0.5 * np.log(2 * np.pi) + log_std + jacobian
        _, entropy = head.evaluate(torch.tensor([[0.7, log_std]]), torch.zeros(1, 1))
        assert entropy.item() == pytest.approx(expected.item(), abs=0.02)

    def test_entropy_is_differentiable(self) -> None:
        head, params = SquashedGaussianHead(4, SPACE), make_params().requires_grad_()
        head.evaluate(params, torch.zeros(50, 3))[1].sum().backward()
        assert params.grad is not None
        # Unlike a plain Gaussian's, the entropy falls as the mean leaves the middle of the bounds.
        assert (params.grad[:, :3].sign() == -params[:, :3].sign()).all()

    def test_actions_lie_inside_the_bounds_however_far_the_sample(self) -> None:
        given = SquashedGaussianHead(4, SPACE).to_env(torch.tensor([[1e4] * 3, [-1e4] * 3, [0.0] * 3]))
        assert all(SPACE.contains(action) for action in given.numpy())
        torch.testing.assert_close(given[0], torch.tensor(HIGH))
        torch.testing.assert_close(given[1], torch.tensor(LOW))
        torch.testing.assert_close(given[2], (torch.tensor(LOW) + torch.tensor(HIGH)) / 2)

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Box(-np.inf, np.inf, (2,)),
            spaces.Box(np.float32([0, -np.inf]), np.float32([1, 1])),
            spaces.Box(-3e38, 3e38, (2,)),
            spaces.Box(1.0, 1.0, (2,)),
        ],
    )
    def test_needs_finite_bounds(self, space: spaces.Box) -> None:
        with pytest.raises(ConfigurationError, match="set squash_actions to false"):
            SquashedGaussianHead(4, space)
