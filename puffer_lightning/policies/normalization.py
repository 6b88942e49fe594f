"""Running statistics that a policy keeps: of its observations and of the returns it is trained on.

They are buffers, so they are saved and loaded with the policy. Nothing but ``update``, which the learner
calls once an iteration, changes them: rollout, update and evaluation see them frozen.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.distributed import global_sum
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.masking import ACTION_MASK, unmasked
from puffer_lightning.policies.nesting import fill, leaf_spaces, select, template

LIMIT = 10.0
"""Normalised observations are clipped to this many standard deviations from the mean, on either side."""

# A relative spread this small (its square) is rounding, and dividing by it would blow rounding up.
_ROUNDING = 1e-24


class RunningMoments(nn.Module):
    """Count, mean and standard deviation of all samples so far, elementwise, over all ranks.

    Accumulated in float64, whatever dtype the module is converted to, and counted in int64. With mean m_B and
    sum of squared deviations S_B of the n_B new samples, which are about their own mean so that no digits are
    lost, and n' = n + n_B::

        m' = m + (m_B − m) · n_B / n',  S' = S + S_B + (m_B − m)² · n · n_B / n',  std = sqrt(S / n)

    Source: Chan, Golub and LeVeque 1983, eq. 2.1 (doi:10.1080/00031305.1983.10483115).

    Args:
        size: elements K of one sample.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """Standard deviations ``[K]``, float64; 1 where there is no spread, or none beyond rounding."""
        variance = self.squares / self.count.clamp(min=1)
        return torch.where(variance > _ROUNDING * self.mean.square(), variance, 1.0).sqrt()

    @torch.no_grad()
    def update(self, samples: Tensor, valid: Tensor) -> None:
        """Take in the samples of all ranks, in place.

        Args:
            samples: ``[..., K]``, as many as ``valid`` has elements, in its order.
            valid: bool, False where a sample does not count; nor does one that is not finite.
        """
        samples = samples.reshape(-1, len(self.mean)).double()
        rows = valid.reshape(-1, 1) & samples.isfinite().all(-1, keepdim=True)
        deviations = (samples - self.mean).where(rows, 0.0)
        totals = global_sum(torch.cat((rows.sum(0).double(), deviations.sum(0))))
        number = totals[0]
        shift = totals[1:] / number.clamp(min=1.0)
        squares = global_sum((deviations - shift).where(rows, 0.0).square().sum(0))
        share = number / (self.count + number).clamp(min=1.0)
        self.squares += squares + shift.square() * (self.count * share)
        self.mean += shift * share
        self.count += number.to(torch.int64)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningMoments":
        # module.bfloat16() shall move the accumulators but not round them.
        exact = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in exact.items():
            after = self._buffers[name]
            assert before is not None
            assert after is not None
            if after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class Normalizer(nn.Module, ABC):
    """What normalises the observations that a policy is given."""

    @abstractmethod
    def forward(self, observations: Any) -> Any:
        """Return the observations, any leading dimensions, nested as they came."""

    @abstractmethod
    def update(self, observations: Any, valid: Tensor) -> None:
        """Take in the observations of a rollout, of all ranks.

        Args:
            observations: pytree of tensors ``[T, N, ...]``, or ``MaskedObservations`` of such.
            valid: ``[T, N]`` bool.
        """


class ObservationNormalizer(Normalizer):
    """Observations shifted and scaled to mean 0 and standard deviation 1, elementwise.

    All Box parts are but those of uint8, which their bounds scale to [0, 1]; others stay as they are. Results
    are float32, clipped to ± ``LIMIT``. Until the first update mean is 0 and deviation 1.

    Args:
        space: the observation space of one environment.

    Raises:
        ConfigurationError: if no part of the space can be normalised.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        if isinstance(space, spaces.Dict):
            seen = OrderedDict((key, part) for key, part in space.spaces.items() if key != ACTION_MASK)
            space = spaces.Dict(seen)
        leaves = leaf_spaces(space)
        self._template = template(space)
        self._paths = tuple(leaves)
        self._boxes = {
            number: leaf.shape
            for number, leaf in enumerate(leaves.values())
            if isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8
        }
        if not self._boxes:
            raise ConfigurationError(
                f"normalize_observations finds nothing to normalise in {space}, which has no Box part but of "
                "uint8: set it to false."
            )
        self._sizes = [math.prod(shape) for shape in self._boxes.values()]
        self.moments = RunningMoments(sum(self._sizes))

    def forward(self, observations: Any) -> Any:
        """Return the observations, any leading dimensions, nested as they came."""
        leaves = [select(observations, path) for path in self._paths]
        means = self.moments.mean.split_with_sizes(self._sizes)
        stds = self.moments.std.split_with_sizes(self._sizes)
        for (number, shape), mean, std in zip(self._boxes.items(), means, stds, strict=True):
            leaf, exact = leaves[number], _exact_dtype(leaves[number])
            standardised = (leaf.to(exact) - mean.view(shape).to(exact)) / std.view(shape).to(exact)
            leaves[number] = standardised.float().clamp(-LIMIT, LIMIT)
        return fill(self._template, leaves)

    @torch.no_grad()
    def update(self, observations: Any, valid: Tensor) -> None:
        """Take in the observations of a rollout, of all ranks.

        Args:
            observations: pytree of tensors ``[T, N, ...]``, or ``MaskedObservations`` of such.
            valid: ``[T, N]`` bool.
        """
        seen = unmasked(observations)
        boxes = [select(seen, self._paths[number]) for number in self._boxes]
        self.moments.update(torch.cat([box.reshape(valid.numel(), -1).double() for box in boxes], -1), valid)


class RewardNormalizer(nn.Module):
    """Rewards divided by the running standard deviation of discounted returns; neither shifted nor clipped.

    Source: Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 3
    (arXiv:2005.12729).
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments = RunningMoments(1)

    def forward(self, rewards: Tensor) -> Tensor:
        """Return scaled rewards of the same shape and dtype."""
        return rewards / self.moments.std.to(rewards.dtype)

    @torch.no_grad()
    def update(self, returns: Tensor, valid: Tensor) -> None:
        """Take in the discounted returns of a rollout, of all ranks.

        Args:
            returns: ``[T, N]``, of ``running_returns``.
            valid: ``[T, N]`` bool.
        """
        self.moments.update(returns.unsqueeze(-1), valid)


def _exact_dtype(leaf: Tensor) -> torch.dtype:
    """In which no digits of ``leaf`` are lost: float32 for floats of 32 bits or fewer, else float64."""
    return torch.float32 if leaf.is_floating_point() and leaf.dtype != torch.float64 else torch.float64
