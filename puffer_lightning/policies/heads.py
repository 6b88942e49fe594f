"""The action head of an action space."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.action_head import ActionHead, LinearHead
from puffer_lightning.policies.categorical import CategoricalHead, MultiCategoricalHead
from puffer_lightning.policies.gaussian import GaussianHead, SquashedGaussianHead
from puffer_lightning.policies.hybrid import HybridHead
from puffer_lightning.policies.nesting import leaf_spaces

__all__ = [
    "ActionHead",
    "CategoricalHead",
    "GaussianHead",
    "HybridHead",
    "LinearHead",
    "MultiCategoricalHead",
    "SquashedGaussianHead",
    "make_head",
]


def make_head(
    num_features: int, action_space: gym.Space[Any], squash: bool = False, log_std_init: float = 0.0
) -> ActionHead:
    """Build the head that fits an action space.

    Args:
        num_features: size of the features' last dimension.
        action_space: the action space of one environment: Discrete, MultiDiscrete, MultiBinary, a
            floating-point Box, or a Dict or Tuple of them, nested at will.
        squash: squash the actions of Box spaces by tanh to their bounds, instead of clipping them.
        log_std_init: initial logarithm of the standard deviation of the actions of Box spaces.

    Raises:
        ConfigurationError: if a space has no head, or ``squash`` does not fit it.
    """
    leaves = leaf_spaces(action_space)
    if not leaves:
        raise ConfigurationError(f"The action space {action_space} is empty: give it something to choose.")
    if squash and not any(isinstance(leaf, spaces.Box) for leaf in leaves.values()):
        raise ConfigurationError(
            f"squash_actions is for Box action spaces, and this one is {type(action_space).__name__}: "
            "set squash_actions to false."
        )
    heads = {path: _leaf_head(num_features, leaf, squash, log_std_init) for path, leaf in leaves.items()}
    return heads[()] if () in heads else HybridHead(action_space, dict(heads))


def _leaf_head(num_features: int, space: gym.Space[Any], squash: bool, log_std_init: float) -> LinearHead:
    if isinstance(space, spaces.Box):
        head = SquashedGaussianHead if squash else GaussianHead
        return head(num_features, space, log_std_init)
    if isinstance(space, spaces.Discrete):
        return CategoricalHead(num_features, space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategoricalHead(num_features, space)
    if isinstance(space, spaces.MultiBinary):
        two_each: spaces.MultiDiscrete[Any] = spaces.MultiDiscrete(np.full(space.shape, 2), dtype=np.int8)
        return MultiCategoricalHead(num_features, two_each)
    raise ConfigurationError(
        f"{type(space).__name__} action spaces are not supported: wrap the environment so that its actions "
        "are Discrete, MultiDiscrete, MultiBinary, Box, or Dict or Tuple of these."
    )
