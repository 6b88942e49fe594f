"""Convolutions, each followed by a ReLU, in the memory layouts that suit a CPU.

To lay frames out channel by channel, byte by byte, takes a CPU as long as to convolve them; word by word it
takes a third. The gradient of a convolution with a horizontal stride is slower than that of the same one
without, which reads neighbouring columns side by side as channels. See docs/adr/0030.
"""

import torch
from torch import Tensor, nn

# Columns of a frame that are one 32-bit word.
_WORD = 4


def can_lay_out(images: Tensor, weight: Tensor) -> bool:
    """Whether the functions here can stand in for the layers: for bytes on the CPU, in full precision, eager.

    In half precision the weights that are multiplied by the scale would lose digits.

    Args:
        images: What goes into the first layer.
        weight: Of that layer.
    """
    return (
        images.device.type == "cpu"
        and images.dtype == torch.uint8
        and weight.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def convolve_frames(frames: Tensor, layer: nn.Conv2d, scale: float) -> Tensor:
    """Return relu(layer(scale · frames)).

    Args:
        frames: ``[B, C, H, W]`` uint8.
        layer: The convolution.
        scale: Multiplies the weights instead, which are fewer.

    Returns:
        ``[B, O, H', W']`` of the layer's dtype.
    """
    weight = layer.weight * scale
    aligned = frames.is_contiguous() and frames.storage_offset() % _WORD == 0
    if aligned and _can_fold(layer, frames.shape[-1], _WORD):
        # Within a word the columns are of one channel, so they come after the channels.
        weight = columns_of_weight(weight, _WORD).transpose(1, 2).flatten(1, 2)
        stride = layer.stride[0], layer.stride[1] // _WORD
        images = words_as_channels(frames).to(weight.dtype)
        return torch.conv2d(images, weight, layer.bias, stride).relu_()
    images = frames.to(weight.dtype, memory_format=torch.channels_last)
    return torch.conv2d(images, weight, layer.bias, layer.stride, layer.padding).relu_()


def convolve(images: Tensor, layer: nn.Conv2d) -> Tensor:
    """Return relu(layer(images)).

    Args:
        images: ``[B, C, H, W]``, in channels-last memory.
        layer: The convolution.

    Returns:
        ``[B, O, H', W']``, likewise.
    """
    columns = layer.stride[1]
    if columns == 1 or not _can_fold(layer, images.shape[-1], columns):
        return torch.conv2d(images, layer.weight, layer.bias, layer.stride, layer.padding).relu_()
    weight = columns_of_weight(layer.weight, columns).flatten(1, 2)
    return torch.conv2d(
        columns_as_channels(images, columns), weight, layer.bias, (layer.stride[0], 1)
    ).relu_()


def words_as_channels(frames: Tensor) -> Tensor:
    """Make four neighbouring columns of each channel four channels.

    Args:
        frames: ``[B, C, H, W]`` uint8, contiguous, W a multiple of 4.

    Returns:
        ``[B, C · 4, H, W / 4]`` uint8, in channels-last memory.
    """
    words = torch.stack(frames.view(torch.int32).unbind(1), -1)
    return words.view(torch.uint8).permute(0, 3, 1, 2)


def columns_as_channels(images: Tensor, columns: int) -> Tensor:
    """Make neighbouring columns channels, those of the left column first.

    Args:
        images: ``[B, C, H, W]``; nothing is copied if they are in channels-last memory.
        columns: How many, a divisor of W.

    Returns:
        ``[B, columns · C, H, W / columns]``, in channels-last memory.
    """
    batch, channels, height, width = images.shape
    rows = images.permute(0, 2, 3, 1).reshape(batch, height, width // columns, columns * channels)
    return rows.permute(0, 3, 1, 2)


def columns_of_weight(weight: Tensor, columns: int) -> Tensor:
    """Divide a kernel's columns as those of the images.

    Args:
        weight: ``[O, C, K, L]``.
        columns: How many become channels, a divisor of L.

    Returns:
        ``[O, columns, C, K, L / columns]``.
    """
    *others, width = weight.shape
    return weight.reshape(*others, width // columns, columns).movedim(4, 1)


def _can_fold(layer: nn.Conv2d, width: int, columns: int) -> bool:
    """Whether so many columns of images of this width can be channels."""
    sizes = width, layer.kernel_size[1], layer.stride[1]
    return not any(size % columns for size in sizes) and not any(map(int, layer.padding))
