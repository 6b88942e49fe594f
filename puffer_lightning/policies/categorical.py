"""Action heads of the discrete action spaces."""

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from puffer_lightning.policies.action_head import LinearHead
from puffer_lightning.policies.constants import Constant, torch_dtype

# Finite, because -inf would make 0 · log 0 = nan in the entropy.
_IMPOSSIBLE = -1e30


def fill_gumbel(noise: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill ``noise`` (any shape, float32) in place with standard Gumbel noise, -log(-log u), u ~ U(0, 1)."""
    # Torch's own exponential takes six times as long on the CPU. At exactly 0 or 1 it would not be finite,
    # and inf would win against any probability.
    of = torch.finfo(noise.dtype)
    noise.uniform_(generator=generator).clamp_(of.tiny, 1 - of.eps / 2).log_().neg_().log_().neg_()


def sample_categorical(log_probs: Tensor, gumbel: Tensor) -> Tensor:
    """Sample indices ``[...]`` by the exponential race argmax(log p - log e), also known as Gumbel-max.

    Source: Maddison, Tarlow and Minka 2014, "A* Sampling" (arXiv:1411.0030).

    Args:
        log_probs: log-probabilities ``[..., n]``, up to a constant.
        gumbel: standard Gumbel noise ``[..., n]``.
    """
    return (log_probs + gumbel).argmax(-1)


def select(log_probs: Tensor, indices: Tensor) -> Tensor:
    """Return the entries ``[...]`` of ``log_probs`` ``[..., n]`` at ``indices`` ``[...]``."""
    return log_probs.gather(-1, indices.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropies ``[...]``, in nats, of normalised, finite log-probabilities ``[..., n]``."""
    return -(log_probs.exp() * log_probs).sum(-1)


class CategoricalHead(LinearHead):
    """A categorical distribution over a ``Discrete`` space.

    Stored actions count from 0, as int64 scalars; ``to_env`` adds the space's ``start``.

    Args:
        num_features: size of the features' last dimension.
        space: the action space.
    """

    def __init__(self, num_features: int, space: spaces.Discrete) -> None:
        n = int(space.n)
        super().__init__(
            num_features, n, action_shape=(), action_dtype=torch.int64, noise_size=n, num_choices=n
        )
        self.start = int(space.start)
        self.env_dtype = torch_dtype(space.dtype)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``noise`` with Gumbel noise: see ``ActionHead.fill_noise``."""
        fill_gumbel(noise, generator)

    def mask(self, params: Tensor, action_mask: Tensor) -> Tensor:
        """Make masked actions impossible: see ``ActionHead.mask``."""
        return params.float().masked_fill(~action_mask, _IMPOSSIBLE)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample by Gumbel-max: see ``ActionHead.sample``."""
        log_probs = params.float().log_softmax(-1)
        actions = sample_categorical(log_probs, noise)
        return actions, select(log_probs, actions)

    def mode(self, params: Tensor) -> Tensor:
        """Return the most probable actions."""
        return params.argmax(-1)

    def evaluate(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies: see ``ActionHead.evaluate``."""
        log_probs = params.float().log_softmax(-1)
        return select(log_probs, actions), categorical_entropy(log_probs)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return ``start`` + actions."""
        return (actions + self.start if self.start else actions).to(self.env_dtype)


class MultiCategoricalHead(LinearHead):
    """Independent categorical distributions, one for each of the K factors of a ``MultiDiscrete`` space.

    All factors are computed together, each padded to the largest one. Stored actions count from 0, as
    int64 of the space's shape; ``to_env`` adds the space's ``start``.

    Args:
        num_features: size of the features' last dimension.
        space: the action space.
    """

    def __init__(self, num_features: int, space: spaces.MultiDiscrete) -> None:
        nvec = space.nvec.reshape(-1)
        self.num_factors, self.largest = len(nvec), int(nvec.max())
        size = self.num_factors * self.largest
        super().__init__(
            num_features,
            size,
            tuple(space.shape),
            torch.int64,
            noise_size=size,
            num_choices=int(nvec.sum()),
        )
        padding = np.arange(self.largest) >= nvec[:, None]
        self.padding = Constant(padding)
        self._choices = Constant(np.flatnonzero(~padding))
        self.start = Constant(space.start.astype(np.int64))
        self.env_dtype = torch_dtype(space.dtype)

    def _log_probs(self, params: Tensor) -> Tensor:
        logits = params.float().reshape(*params.shape[:-1], self.num_factors, self.largest)
        return logits.masked_fill(self.padding.on(params.device), _IMPOSSIBLE).log_softmax(-1)

    def _stored(self, indices: Tensor) -> Tensor:
        return indices.reshape(*indices.shape[:-1], *self.action_shape)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``noise`` with Gumbel noise: see ``ActionHead.fill_noise``."""
        fill_gumbel(noise, generator)

    def mask(self, params: Tensor, action_mask: Tensor) -> Tensor:
        """Make masked values of each factor impossible: see ``ActionHead.mask``."""
        chosen_by = self._choices.on(params.device)
        padded = torch.zeros_like(params, dtype=torch.bool).index_copy(-1, chosen_by, action_mask)
        return params.float().masked_fill(~padded, _IMPOSSIBLE)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample each factor by Gumbel-max: see ``ActionHead.sample``."""
        log_probs = self._log_probs(params)
        indices = sample_categorical(log_probs, noise.reshape(log_probs.shape))
        return self._stored(indices), select(log_probs, indices).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        """Return the most probable action of each factor."""
        return self._stored(self._log_probs(params).argmax(-1))

    def evaluate(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, summed over the factors: see ``ActionHead.evaluate``."""
        log_probs = self._log_probs(params)
        indices = actions.reshape(log_probs.shape[:-1])
        return select(log_probs, indices).sum(-1), categorical_entropy(log_probs).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return ``start`` + actions."""
        return (actions + self.start.on(actions.device)).to(self.env_dtype)
