"""The action head of an action space."""

from typing import Any

import gymnasium as gym
from gymnasium import spaces

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.action_head import ActionHead
from puffer_lightning.policies.categorical import CategoricalHead, MultiCategoricalHead
from puffer_lightning.policies.gaussian import GaussianHead, SquashedGaussianHead

__all__ = [
    "ActionHead",
    "CategoricalHead",
    "GaussianHead",
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
        action_space: the action space of one environment: Discrete, MultiDiscrete or a floating-point Box.
        squash: squash the actions of a Box space by tanh to its bounds, instead of clipping them.
        log_std_init: initial logarithm of the standard deviation of the actions of a Box space.

    Raises:
        ConfigurationError: if the space has no head, or ``squash`` does not fit it.
    """
    if isinstance(action_space, spaces.Box):
        head = SquashedGaussianHead if squash else GaussianHead
        return head(num_features, action_space, log_std_init)
    if squash:
        raise ConfigurationError(
            f"squash_actions is for Box action spaces, and this one is {type(action_space).__name__}: "
            "set squash_actions to false."
        )
    if isinstance(action_space, spaces.Discrete):
        return CategoricalHead(num_features, action_space)
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategoricalHead(num_features, action_space)
    raise ConfigurationError(
        f"{type(action_space).__name__} action spaces are not supported: "
        "wrap the environment so that its actions are Discrete, MultiDiscrete or Box."
    )
