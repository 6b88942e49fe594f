"""The action head of Dict and Tuple action spaces."""

from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import torch
from torch import Tensor, nn

from puffer_lightning.policies.action_head import ActionHead, Actions
from puffer_lightning.policies.nesting import Path, fill, select, template


class HybridHead(ActionHead):
    """Independent distributions over the parts of a Dict or Tuple action space, nested at will.

    Stored actions are nested as the space is. Parameters and noise of the parts lie side by side, in the
    order of the space; log-probabilities and entropies add up.

    Args:
        space: the action space.
        parts: the head of each leaf of the space, by path.
    """

    def __init__(self, space: gym.Space[Any], parts: dict[Path, ActionHead]) -> None:
        heads = list(parts.values())
        super().__init__(
            num_params=sum(head.num_params for head in heads),
            noise_size=sum(head.noise_size for head in heads),
            num_choices=sum(head.num_choices for head in heads),
        )
        self.template = template(space)
        self.paths = tuple(parts)
        self.parts = nn.ModuleList(heads)

    @property
    def _heads(self) -> list[ActionHead]:
        return cast(list[ActionHead], list(self.parts))

    def forward(self, features: Tensor) -> Tensor:
        """Return the parameters of all parts side by side, ``[..., P]``."""
        return torch.cat([part(features) for part in self.parts], -1)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill each part's share of ``noise``: see ``ActionHead.fill_noise``."""
        for head, share in zip(self._heads, self._noise_shares(noise), strict=True):
            head.fill_noise(share, generator)

    def empty_actions(self, *leading: int, device: torch.device | str | None = None) -> Actions:
        """Return zeros, nested as the space: see ``ActionHead.empty_actions``."""
        return self._nest([head.empty_actions(*leading, device=device) for head in self._heads])

    def mask(self, params: Tensor, action_mask: Tensor) -> Tensor:
        """Mask the parts that have discrete factors: see ``ActionHead.mask``."""
        masks = action_mask.split_with_sizes([head.num_choices for head in self._heads], -1)
        return torch.cat(
            [
                head.mask(share, mask) if head.num_choices else share
                for head, share, mask in zip(self._heads, self._shares(params), masks, strict=True)
            ],
            -1,
        )

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Actions, Tensor]:
        """Sample each part: see ``ActionHead.sample``."""
        sampled = [
            head.sample(share, noise_share)
            for head, share, noise_share in zip(
                self._heads, self._shares(params), self._noise_shares(noise), strict=True
            )
        ]
        actions, log_probs = zip(*sampled, strict=True)
        return self._nest(actions), _total(log_probs)

    def mode(self, params: Tensor) -> Actions:
        """Return the greedy actions of each part."""
        return self._nest(
            [head.mode(share) for head, share in zip(self._heads, self._shares(params), strict=True)]
        )

    def evaluate(self, params: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, summed over the parts: see ``ActionHead.evaluate``."""
        evaluated = [
            head.evaluate(share, select(actions, path))
            for head, path, share in zip(self._heads, self.paths, self._shares(params), strict=True)
        ]
        log_probs, entropies = zip(*evaluated, strict=True)
        return _total(log_probs), _total(entropies)

    def to_env(self, actions: Actions) -> Actions:
        """Turn the actions of each part into members of its space."""
        return self._nest(
            [head.to_env(select(actions, path)) for head, path in zip(self._heads, self.paths, strict=True)]
        )

    def _nest(self, leaves: Sequence[Any]) -> Actions:
        return fill(self.template, leaves)

    def _shares(self, params: Tensor) -> tuple[Tensor, ...]:
        return params.split_with_sizes([head.num_params for head in self._heads], -1)

    def _noise_shares(self, noise: Tensor) -> tuple[Tensor, ...]:
        return noise.split_with_sizes([head.noise_size for head in self._heads], -1)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(terms)).sum(0)
