"""Action heads of continuous action spaces."""

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.action_head import LinearHead
from puffer_lightning.policies.constants import Constant

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_QUADRATURE_NODES = 16


def gaussian_log_prob(mean: Tensor, log_std: Tensor, samples: Tensor) -> Tensor:
    """Return the log-densities ``[...]`` of samples ``[..., D]`` under a diagonal Gaussian.

    Formula: Σ_d [-½ ((x_d - μ_d) / σ_d)² - log σ_d - ½ log 2π].

    Args:
        mean: μ ``[..., D]``.
        log_std: log σ ``[..., D]``.
        samples: x ``[..., D]``.
    """
    standardised = (samples - mean) * (-log_std).exp()
    return (-0.5 * standardised.square() - log_std - _HALF_LOG_2PI).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Return the entropies ``[...]``, Σ_d [½ + ½ log 2π + log σ_d] nats, for log σ ``[..., D]``."""
    return (log_std + (0.5 + _HALF_LOG_2PI)).sum(-1)


def log_tanh_derivative(u: Tensor) -> Tensor:
    """Return log(1 - tanh² u) elementwise, as 2 (log 2 - u - softplus(-2u)): finite far from 0."""
    return 2 * (math.log(2) - u - softplus(-2 * u))


class GaussianHead(LinearHead):
    """A diagonal Gaussian over a floating-point ``Box`` with D elements.

    The mean depends on the features, the standard deviation is trained but does not. Stored actions, and
    their log-probabilities, are those of the unbounded sample; ``to_env`` clips to the bounds.

    Args:
        num_features: size of the features' last dimension.
        space: the action space.
        log_std_init: initial logarithm of the standard deviation.

    Raises:
        ConfigurationError: if the space is not of a floating-point dtype.
    """

    def __init__(self, num_features: int, space: spaces.Box, log_std_init: float = 0.0) -> None:
        if not np.issubdtype(space.dtype, np.floating):
            raise ConfigurationError(
                f"The action space {space} holds integers, which a Gaussian cannot give: "
                "make it a Discrete, MultiDiscrete or floating-point Box space."
            )
        size = math.prod(space.shape)
        super().__init__(
            num_features, size, tuple(space.shape), torch.float32, noise_size=size, num_params=2 * size
        )
        self.log_std = nn.Parameter(torch.full((size,), float(log_std_init)))
        self.low, self.high = Constant(space.low), Constant(space.high)

    def forward(self, features: Tensor) -> Tensor:
        """Return means and log standard deviations side by side, ``[..., 2 D]``."""
        mean: Tensor = self.linear(features)
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``noise`` with standard normal noise: see ``ActionHead.fill_noise``."""
        noise.normal_(generator=generator)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ + σ · noise and its log-probability: see ``ActionHead.sample``."""
        mean, log_std = params.float().chunk(2, -1)
        samples = (mean + log_std.exp() * noise).detach()
        return self._stored(samples), self._log_prob(mean, log_std, samples)

    def mode(self, params: Tensor) -> Tensor:
        """Return the means."""
        return self._stored(params.float().chunk(2, -1)[0])

    def evaluate(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies: see ``ActionHead.evaluate``."""
        mean, log_std = params.float().chunk(2, -1)
        return self._log_prob(mean, log_std, actions.reshape(mean.shape)), self._entropy(mean, log_std)

    def to_env(self, actions: Tensor) -> Tensor:
        """Clip to the space's bounds."""
        low, high = self.low.on(actions.device), self.high.on(actions.device)
        return actions.to(low.dtype).clamp(low, high)

    def _stored(self, samples: Tensor) -> Tensor:
        return samples.reshape(*samples.shape[:-1], *self.action_shape)

    def _log_prob(self, mean: Tensor, log_std: Tensor, samples: Tensor) -> Tensor:
        return gaussian_log_prob(mean, log_std, samples)

    def _entropy(self, mean: Tensor, log_std: Tensor) -> Tensor:
        return gaussian_entropy(log_std)


class SquashedGaussianHead(GaussianHead):
    """A diagonal Gaussian squashed by tanh and scaled to the bounds of a ``Box``.

    Source: Haarnoja et al. 2018, appendix C (arXiv:1801.01290). Stored actions are the samples u before
    tanh; log-probabilities and entropies are those of the action that the environment is given, in its units:
    log π(a) = log N(u) - Σ_d [log(1 - tanh² u_d) + log((high_d - low_d) / 2)]. The entropy takes the
    expectation of that Jacobian term by Gauss-Hermite quadrature, so it is deterministic and differentiable.
    The greedy action is that of the Gaussian's mean, the median of the squashed distribution.

    Args:
        num_features: size of the features' last dimension.
        space: the action space.
        log_std_init: initial logarithm of the standard deviation before tanh.

    Raises:
        ConfigurationError: if the space is not of a floating-point dtype, or its bounds are not finite or
            leave no room between them.
    """

    def __init__(self, num_features: int, space: spaces.Box, log_std_init: float = 0.0) -> None:
        super().__init__(num_features, space, log_std_init)
        with np.errstate(over="ignore", invalid="ignore"):
            width = space.high - space.low
        if not (np.isfinite(width) & (width > 0)).all():
            raise ConfigurationError(
                f"squash_actions needs finite bounds with low < high, which the action space {space} lacks: "
                "set squash_actions to false, or bound the space, for example with "
                "gymnasium.wrappers.RescaleAction or a Box with finite low and high."
            )
        self._log_scale = float(np.log(0.5 * width.astype(np.float64)).sum())
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        self._nodes = Constant(nodes.astype(np.float32))
        self._weights = Constant((weights / weights.sum()).astype(np.float32))

    def to_env(self, actions: Tensor) -> Tensor:
        """Squash by tanh and scale to the space's bounds."""
        low, high = self.low.on(actions.device), self.high.on(actions.device)
        unit = 0.5 * (actions.to(low.dtype).tanh() + 1)
        # Rounding may leave the bounds by a hair.
        return torch.lerp(low.expand_as(unit), high.expand_as(unit), unit).clamp(low, high)

    def _log_prob(self, mean: Tensor, log_std: Tensor, samples: Tensor) -> Tensor:
        log_jacobian = log_tanh_derivative(samples).sum(-1) + self._log_scale
        return gaussian_log_prob(mean, log_std, samples) - log_jacobian

    def _entropy(self, mean: Tensor, log_std: Tensor) -> Tensor:
        nodes, weights = self._nodes.on(mean.device), self._weights.on(mean.device)
        u = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes
        log_jacobian = (log_tanh_derivative(u) * weights).sum((-1, -2)) + self._log_scale
        return gaussian_entropy(log_std) + log_jacobian
