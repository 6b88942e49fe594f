"""Weight initialisation of the policy networks.

The gains are the customary ones of PPO (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
Optimization", detail 2); Andrychowicz et al. 2021 (arXiv:2006.05990, section 3.2) measured that the small one
of the action layer matters.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from puffer_lightning.errors import ConfigurationError

HIDDEN_GAIN = math.sqrt(2)
"""Gain of hidden layers."""
ACTION_GAIN = 0.01
"""Gain of the layer that gives the action distribution: nearly the same distribution for every input."""
VALUE_GAIN = 1.0
"""Gain of the layer that gives the value."""

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Give a layer orthogonal weights (Saxe et al. 2014, arXiv:1312.6120) and zero biases, in place.

    Args:
        layer: a linear or convolutional layer with a bias.
        gain: every singular value of the weight, seen as an ``[outputs, inputs]`` matrix.

    Returns:
        The same layer.
    """
    assert layer.bias is not None
    make_orthogonal(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def make_orthogonal(weight: Tensor, gain: float) -> None:
    """Fill a weight with an orthogonal matrix times ``gain``, in place."""
    # In float32, since the decomposition knows no half precision, which the policy may be made in.
    weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32), gain))


def check_positive(option: str, *sizes: int) -> None:
    """Refuse a network without layers, or a layer without units.

    Args:
        option: the option's name, for the message.
        *sizes: numbers of units.

    Raises:
        ConfigurationError: if there is no size, or one below 1.
    """
    if not sizes or min(sizes) < 1:
        given = ", ".join(map(str, sizes)) or "nothing"
        raise ConfigurationError(f"{option} cannot be {given}: set it to 1 or more units for every layer.")
