"""Encoders of images: convolutional networks."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import relu

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.convolutions import can_lay_out, convolve, convolve_frames
from puffer_lightning.policies.encoders import input_scale
from puffer_lightning.policies.initialization import check_positive, orthogonal

_SMALLEST_SIDE = 8

# Each part's first convolution then reads 16 MiB of float32.
_CACHED_PIXELS = 2**22

# Output channels, kernel size, stride and padding of each layer.
_NATURE_LAYERS = ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))
_NATURE_SMALLEST_SIDE = 36
_SMALL_LAYERS = ((16, 3, 2, 1), (32, 3, 2, 1), (32, 3, 1, 1))


@dataclass(frozen=True)
class ImageLayout:
    """How the images of an observation space lie in memory, and their range.

    Images are ``[H, W]``, ``[C, H, W]`` (stacked frames) or ``[H, W, C]`` (RGB); of the first and the last
    axis, the shorter one is the channels.
    """

    channels: int
    height: int
    width: int
    rank: int
    channels_last: bool
    scale: float

    @classmethod
    def of(cls, space: gym.Space[Any]) -> "ImageLayout | None":
        """Return the layout of a Box of rank 2 or 3 with both sides 8 or larger, None for other spaces."""
        if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
            return None
        rank = len(space.shape)
        shape = (1, *space.shape) if rank == 2 else space.shape
        channels_last = shape[-1] < shape[0]
        if channels_last:
            height, width, channels = shape
        else:
            channels, height, width = shape
        if min(height, width) < _SMALLEST_SIDE:
            return None
        return cls(channels, height, width, rank, channels_last, input_scale(space))

    def channels_first(self, images: Tensor) -> Tensor:
        """Return a view ``[B, C, H, W]`` of images ``[B, *space.shape]``."""
        if self.rank == 2:
            return images.unsqueeze(1)
        return images.permute(0, 3, 1, 2) if self.channels_last else images

    def scaled(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return images ``[B, C, H, W]`` as ``dtype``, uint8 scaled to [0, 1]."""
        # Convolutions are a quarter faster (NatureCNN, CPU) to twice as fast (IMPALA) in this memory format.
        images = images.to(dtype, memory_format=torch.channels_last)
        return images if self.scale == 1.0 else images * self.scale


def is_image(space: gym.Space[Any]) -> bool:
    """Tell whether a space is a uint8 Box ``[H, W]``, ``[C, H, W]`` or ``[H, W, C]``, sides 8 or more."""
    return space.dtype == np.uint8 and ImageLayout.of(space) is not None


class ImageEncoder(nn.Module, ABC):
    """Convolutions, then one linear layer with a ReLU.

    Args:
        observation_space: the observation space of one environment: images.
        hidden_size: units of the linear layer.

    Raises:
        ConfigurationError: if the space does not hold images, or ``hidden_size`` is below 1.
    """

    def __init__(self, observation_space: gym.Space[Any], hidden_size: int = 512) -> None:
        super().__init__()
        check_positive("hidden_size", hidden_size)
        layout = ImageLayout.of(observation_space)
        if layout is None:
            raise ConfigurationError(
                f"A CNN cannot read the observation space {observation_space}: give it images, a Box of "
                f"shape (H, W), (C, H, W) or (H, W, C) sides of {_SMALLEST_SIDE} or more, or use MLPPolicy."
            )
        self.layout = layout
        self.convolutions = self.build_convolutions(layout)
        with torch.no_grad():
            example = self.convolutions(torch.zeros(1, layout.channels, layout.height, layout.width))
        self.linear = orthogonal(nn.Linear(example.numel(), hidden_size))
        self.num_features = hidden_size

    @abstractmethod
    def build_convolutions(self, layout: ImageLayout) -> nn.Sequential:
        """Return the layers before the linear one, which read ``[B, C, H, W]``."""

    def forward(self, observations: Tensor) -> Tensor:
        """Return features ``[B, num_features]`` for images ``[B, *space.shape]``."""
        images = self.layout.channels_first(observations)
        features = [self.convolve(part).flatten(1) for part in images.chunk(self._num_parts(images))]
        return relu(self.linear(features[0] if len(features) == 1 else torch.cat(features)))

    def convolve(self, images: Tensor) -> Tensor:
        """Return what goes into the linear layer, ``[B, ...]``, for images ``[B, C, H, W]``."""
        features: Tensor = self.convolutions(self.layout.scaled(images, self.linear.weight.dtype))
        return features

    def _num_parts(self, images: Tensor) -> int:
        """Parts of a batch to be convolved one after the other, small enough for a CPU's caches."""
        if images.device.type != "cpu" or torch.compiler.is_compiling():
            return 1
        return max(1, math.ceil(images.numel() / _CACHED_PIXELS))


class NatureCNN(ImageEncoder):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236, Methods), 84 × 84 frames in mind.

    Images with a side below 36, which its kernels do not fit, get three 3 × 3 layers of 16, 32 and 32
    channels with strides 2, 2 and 1 instead.

    Args:
        observation_space: the observation space of one environment: images with sides of 8 or more.
        hidden_size: units of the linear layer.

    Raises:
        ConfigurationError: if the space does not hold images, or ``hidden_size`` is below 1.
    """

    def build_convolutions(self, layout: ImageLayout) -> nn.Sequential:
        """Return three convolutions, each with a ReLU."""
        small = min(layout.height, layout.width) < _NATURE_SMALLEST_SIDE
        layers = nn.Sequential()
        channels = layout.channels
        for outputs, kernel, stride, padding in _SMALL_LAYERS if small else _NATURE_LAYERS:
            layers.append(orthogonal(nn.Conv2d(channels, outputs, kernel, stride, padding)))
            layers.append(nn.ReLU())
            channels = outputs
        return layers

    def convolve(self, images: Tensor) -> Tensor:
        """Return what goes into the linear layer, ``[B, ...]``, for images ``[B, C, H, W]``."""
        first, *others = (layer for layer in self.convolutions if isinstance(layer, nn.Conv2d))
        if not can_lay_out(images, first.weight):
            return super().convolve(images)
        features = convolve_frames(images, first, self.layout.scale)
        for layer in others:
            features = convolve(features, layer)
        return features


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), 3 × 3 kernels, for ``[B, channels, H, W]``.

    Args:
        channels: channels in and out.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.second = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        residual: Tensor = self.second(relu(self.first(relu(x))))
        return x + residual


class ImpalaCNN(ImageEncoder):
    """The residual network of IMPALA (Espeholt et al. 2018, figure 3 right, arXiv:1802.01561), without LSTM.

    Args:
        observation_space: the observation space of one environment: images with sides of 8 or more.
        hidden_size: units of the linear layer.

    Raises:
        ConfigurationError: if the space does not hold images, or ``hidden_size`` is below 1.
    """

    def build_convolutions(self, layout: ImageLayout) -> nn.Sequential:
        """Return three sections, each a convolution, a max-pooling and two residual blocks."""
        layers = nn.Sequential()
        channels = layout.channels
        for outputs in (16, 32, 32):
            layers.append(orthogonal(nn.Conv2d(channels, outputs, 3, padding=1)))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            layers.append(ResidualBlock(outputs))
            layers.append(ResidualBlock(outputs))
            channels = outputs
        return layers.append(nn.ReLU())
