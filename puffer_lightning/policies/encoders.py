"""Encoders of observations as vectors: multi-layer perceptrons."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.constants import Constant
from puffer_lightning.policies.initialization import check_positive, orthogonal
from puffer_lightning.policies.masking import ACTION_MASK
from puffer_lightning.policies.mlp import can_fuse, mlp
from puffer_lightning.policies.nesting import Path, leaf_spaces, select

Activation = Literal["tanh", "relu", "gelu", "silu"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def input_scale(space: spaces.Box) -> float:
    """Return the factor that brings the observations of a Box space to about [0, 1].

    It is 1 / high for uint8 (1/255 for frames and for memory), and 1 for everything else.
    """
    return 1 / max(1.0, float(space.high.max())) if space.dtype == np.uint8 else 1.0


class FlatObservations(nn.Module):
    """Observations as vectors of floats, nothing lost.

    Box and MultiBinary are flattened, Discrete and MultiDiscrete one-hot; the parts of Dict and Tuple spaces,
    nested at will, lie side by side in the order of the space.

    Args:
        space: the observation space of one environment.
        paths: the leaves of the space to read; all but an action mask if None.

    Raises:
        ConfigurationError: if a leaf to read is none of the four, or there is none.
    """

    def __init__(self, space: gym.Space[Any], paths: Sequence[Path] | None = None) -> None:
        super().__init__()
        leaves = observation_leaves(space)
        self.paths = tuple(leaves if paths is None else paths)
        self._leaves = [_FlatLeaf(leaves[path]) for path in self.paths]
        self.num_features = sum(leaf.num_features for leaf in self._leaves)

    def forward(self, observations: Any, dtype: torch.dtype) -> Tensor:
        """Return ``[..., num_features]`` of ``dtype`` for observations with any leading dimensions."""
        if len(self._leaves) == 1:
            return self._leaves[0](select(observations, self.paths[0]), dtype)
        return torch.cat(
            [
                leaf(select(observations, path), dtype)
                for leaf, path in zip(self._leaves, self.paths, strict=True)
            ],
            -1,
        )


class _FlatLeaf:
    """``FlatObservations`` of a space that is neither Dict nor Tuple."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.scale = 1.0
        self.offsets: Constant | None = None
        if isinstance(space, spaces.Discrete):
            self._one_hot_of(np.array([space.n]), np.array([space.start]))
        elif isinstance(space, spaces.MultiDiscrete):
            self._one_hot_of(space.nvec.reshape(-1), space.start.reshape(-1))
        elif isinstance(space, spaces.Box | spaces.MultiBinary):
            self.num_features = math.prod(space.shape)
            self.scale = input_scale(space) if isinstance(space, spaces.Box) else 1.0
        else:
            raise ConfigurationError(
                f"{type(space).__name__} observation spaces are not supported: wrap the environment so that "
                "its observations are Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these, "
                "or write a Policy for it."
            )
        self.shape: tuple[int, ...] = tuple(space.shape or ())

    def _one_hot_of(self, nvec: np.ndarray[Any, Any], start: np.ndarray[Any, Any]) -> None:
        self.num_features = int(nvec.sum())
        self.offsets = Constant((np.cumsum(nvec) - nvec - start).astype(np.int64))

    def __call__(self, observations: Tensor, dtype: torch.dtype) -> Tensor:
        leading = observations.shape[: observations.dim() - len(self.shape)]
        flat = observations.reshape(*leading, math.prod(self.shape))
        if self.offsets is not None:
            indices = flat.long() + self.offsets.on(flat.device)
            zeros = torch.zeros(*leading, self.num_features, dtype=dtype, device=flat.device)
            return zeros.scatter(-1, indices, 1.0)
        flat = flat.to(dtype)
        return flat if self.scale == 1.0 else flat * self.scale


def observation_leaves(space: gym.Space[Any]) -> dict[Path, gym.Space[Any]]:
    """Return the leaves of an observation space that a network reads, by path: all but an action mask.

    Raises:
        ConfigurationError: if there is none.
    """
    leaves = {path: leaf for path, leaf in leaf_spaces(space).items() if path[:1] != (ACTION_MASK,)}
    if not leaves:
        raise ConfigurationError(f"The observation space {space} holds nothing to observe: add to it.")
    return leaves


class MLPEncoder(nn.Module):
    """A multi-layer perceptron with an activation after every layer.

    Args:
        observation_space: the observation space of one environment: Box of any shape and dtype, Discrete,
            MultiDiscrete, MultiBinary, or a Dict or Tuple of them, nested at will.
        hidden_sizes: units of each layer.
        activation: what follows each layer.
        paths: the leaves of the space to read; all but an action mask if None.

    Raises:
        ConfigurationError: if the space is not supported, or an option's value is not.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "tanh",
        paths: Sequence[Path] | None = None,
    ) -> None:
        super().__init__()
        check_positive("hidden_sizes", *hidden_sizes)
        if activation not in _ACTIVATIONS:
            choices = ", ".join(get_args(Activation))
            raise ConfigurationError(f"activation {activation!r} is not known: set it to one of {choices}.")
        self.flatten = FlatObservations(observation_space, paths)
        self.layers = nn.Sequential()
        self._linear = [
            orthogonal(nn.Linear(inputs, outputs))
            for inputs, outputs in pairwise((self.flatten.num_features, *hidden_sizes))
        ]
        for linear in self._linear:
            self.layers.append(linear)
            self.layers.append(_ACTIVATIONS[activation]())
        self.num_features = int(hidden_sizes[-1])
        self.activation = activation

    def forward(self, observations: Any) -> Tensor:
        """Return features ``[..., num_features]`` for observations with any leading dimensions."""
        flat = self.flatten(observations, self._linear[0].weight.dtype)
        if can_fuse(flat, self.activation):
            parameters = [part for layer in self._linear for part in (layer.weight, layer.bias)]
            return mlp(flat, parameters, self.activation)
        features: Tensor = self.layers(flat)
        return features
