"""The encoder of observations of several kinds, and the choice of an encoder."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.cnn import ImageEncoder, ImpalaCNN, NatureCNN, is_image
from puffer_lightning.policies.encoders import MLPEncoder, observation_leaves
from puffer_lightning.policies.initialization import check_positive, orthogonal
from puffer_lightning.policies.nesting import select

Network = Literal["nature", "impala"]

_NETWORKS: dict[str, type[ImageEncoder]] = {"nature": NatureCNN, "impala": ImpalaCNN}


def image_encoder(network: Network) -> type[ImageEncoder]:
    """Return the class of a convolutional network.

    Raises:
        ConfigurationError: if there is no such network.
    """
    if network not in _NETWORKS:
        choices = ", ".join(get_args(Network))
        raise ConfigurationError(f"network {network!r} is not known: set it to one of {choices}.")
    return _NETWORKS[network]


class MultiInputEncoder(nn.Module):
    """A CNN for each image, one MLP for all else, and a linear layer with a ReLU that joins them.

    Images are the uint8 Box leaves of shape (H, W), (C, H, W) or (H, W, C), sides of 8 or more.

    Args:
        observation_space: the observation space of one environment: Box, Discrete, MultiDiscrete or
            MultiBinary, or a Dict or Tuple of them, nested at will.
        network: the convolutional network of every image.
        image_size: features that each image is encoded in.
        vector_sizes: units of each layer of the MLP.
        hidden_size: units of the layer that joins them.

    Raises:
        ConfigurationError: if a leaf is not supported, or an option's value is not.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        network: Network = "nature",
        image_size: int = 256,
        vector_sizes: Sequence[int] = (64,),
        hidden_size: int = 256,
    ) -> None:
        super().__init__()
        check_positive("image_size", image_size)
        check_positive("hidden_size", hidden_size)
        leaves = observation_leaves(observation_space)
        cnn = image_encoder(network)
        self.image_paths = tuple(path for path, leaf in leaves.items() if is_image(leaf))
        self.images = nn.ModuleList(cnn(leaves[path], image_size) for path in self.image_paths)
        vectors = [path for path in leaves if path not in self.image_paths]
        self.vectors = MLPEncoder(observation_space, vector_sizes, "relu", vectors) if vectors else None
        size = image_size * len(self.images) + (self.vectors.num_features if self.vectors else 0)
        self.joint = orthogonal(nn.Linear(size, hidden_size))
        self.num_features = hidden_size

    def forward(self, observations: Any) -> Tensor:
        """Return features ``[B, num_features]`` for a batch of observations, leading dimension B."""
        features = [
            image(select(observations, path))
            for image, path in zip(self.images, self.image_paths, strict=True)
        ]
        if self.vectors is not None:
            features.append(self.vectors(observations))
        return relu(self.joint(torch.cat(features, -1)))


def has_images(observation_space: gym.Space[Any]) -> bool:
    """Whether an observation is an image, or one of the parts of a nested one is."""
    return any(map(is_image, observation_leaves(observation_space).values()))


def make_encoder(
    observation_space: gym.Space[Any], num_features: int, network: Network = "nature"
) -> ImageEncoder | MLPEncoder | MultiInputEncoder:
    """Return the encoder that fits a space, for observations with one leading dimension.

    Args:
        observation_space: the observation space of one environment.
        num_features: size of what the encoder gives.
        network: the convolutional network of images.

    Raises:
        ConfigurationError: if the space is not supported, or an option's value is not.
    """
    if is_image(observation_space):
        return image_encoder(network)(observation_space, num_features)
    if has_images(observation_space):
        return MultiInputEncoder(observation_space, network, hidden_size=num_features)
    return MLPEncoder(observation_space, (num_features,))
