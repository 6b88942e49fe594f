"""Convolutions in other memory layouts are the layers'."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.policies import ImpalaCNN, NatureCNN, cnn
from puffer_lightning.policies.cnn import ImageEncoder
from puffer_lightning.policies.convolutions import (
    can_lay_out,
    columns_as_channels,
    columns_of_weight,
    convolve,
    convolve_frames,
    words_as_channels,
)

# Channels, height, width, kernel, stride, padding; the last four cannot be laid out anew.
FOLDED = [(4, 84, 84, 8, 4, 0), (1, 13, 12, 4, 4, 0), (3, 12, 16, (3, 8), (2, 4), 0), (2, 20, 24, 8, 8, 0)]
AS_IT_IS = [(4, 12, 18, 8, 4, 0), (2, 12, 12, 6, 4, 0), (2, 12, 12, 8, 4, 2), (2, 12, 12, 4, 2, 0)]


def random_frames(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), of)


def test_columns_of_a_word_are_channels() -> None:
    frames = random_frames(2, 3, 5, 8)
    folded = words_as_channels(frames)
    assert folded.shape == (2, 12, 5, 2)
    for channel in range(3):
        for column in range(4):
            assert torch.equal(folded[:, 4 * channel + column], frames[:, channel, :, column::4])


def test_columns_are_channels() -> None:
    images = torch.randn(2, 3, 5, 8).contiguous(memory_format=torch.channels_last)
    folded = columns_as_channels(images, 2)
    assert folded.data_ptr() == images.data_ptr()
    assert torch.equal(folded[:, :3], images[..., ::2])
    assert torch.equal(folded[:, 3:], images[..., 1::2])


def test_a_kernel_is_divided_like_the_images() -> None:
    weight = torch.randn(2, 3, 5, 8)
    divided = columns_of_weight(weight, 4)
    assert divided.shape == (2, 4, 3, 5, 2)
    for column in range(4):
        assert torch.equal(divided[:, column], weight[..., column::4])


@pytest.mark.parametrize(("channels", "height", "width", "kernel", "stride", "padding"), FOLDED + AS_IT_IS)
def test_the_first_layer(
    channels: int, height: int, width: int, kernel: Any, stride: Any, padding: int
) -> None:
    layer = nn.Conv2d(channels, 6, kernel, stride, padding).double()
    frames = random_frames(3, channels, height, width)
    out = convolve_frames(frames, layer, 1 / 255)
    expected = layer(frames.double() / 255).relu()
    torch.testing.assert_close(out, expected)
    assert (expected > 0).any()
    torch.testing.assert_close(
        gradients(out, layer.weight, layer.bias), gradients(expected, layer.weight, layer.bias)
    )


def test_frames_that_do_not_begin_with_a_word() -> None:
    layer = nn.Conv2d(1, 2, 4, 4).double()
    frames = random_frames(2 * 8 * 8 + 1)[1:].view(2, 1, 8, 8)
    torch.testing.assert_close(convolve_frames(frames, layer, 1.0), layer(frames.double()).relu())


def test_elsewhere_the_layers_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, weight = random_frames(1, 4, 84, 84), torch.zeros(1)
    assert can_lay_out(frames, weight)
    assert not can_lay_out(frames.float(), weight)
    assert not can_lay_out(frames.to("meta"), weight)
    assert not can_lay_out(frames, weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_lay_out(frames, weight)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not can_lay_out(frames, weight)
    encoder = NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8), 8)
    seen: list[Any] = []
    encoder.convolutions.register_forward_hook(lambda *_: seen.append(1))
    encoder(random_frames(150, 4, 84, 84))
    assert seen == [1], "at once, by its modules"


@pytest.mark.parametrize("shape", [FOLDED[0], *AS_IT_IS, (3, 9, 9, 3, 1, 0), (3, 9, 9, 3, 1, 1)])
def test_a_later_layer(shape: Any) -> None:
    channels, height, width, *rest = shape
    layer = nn.Conv2d(channels, 6, *rest).double()
    images = torch.randn(3, channels, height, width, dtype=torch.float64)
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    out, expected = convolve(images, layer), layer(images).relu()
    torch.testing.assert_close(out, expected)
    of = images, layer.weight, layer.bias
    torch.testing.assert_close(gradients(out, *of), gradients(expected, *of))


def test_the_gradient_is_that_of_the_function() -> None:
    layer = nn.Conv2d(2, 3, 4, 2).double()
    images = torch.randn(2, 2, 6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: convolve(x, layer), (images, *layer.parameters()))


@pytest.mark.parametrize("encoder_type", [NatureCNN, ImpalaCNN])
@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 4), (40, 37), (3, 16, 16)])
def test_an_encoder_is_its_layers_whatever_the_parts(
    encoder_type: type[ImageEncoder], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_type(spaces.Box(0, 255, shape, np.uint8), 8).double()
    images = random_frames(5, *shape)
    scaled = encoder.layout.scaled(encoder.layout.channels_first(images), torch.float64)
    expected = encoder.linear(encoder.convolutions(scaled).flatten(1)).relu()
    parameters = list(encoder.parameters())
    wanted = gradients(expected, *parameters)
    for pixels in (2**22, 2 * images[0].numel(), 1):
        monkeypatch.setattr(cnn, "_CACHED_PIXELS", pixels)
        out = encoder(images)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradients(out, *parameters), wanted)


def test_parts_are_small_and_of_about_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8), 8)
    sizes: list[int] = []
    convolve_all = encoder.convolve
    monkeypatch.setattr(encoder, "convolve", lambda part: (sizes.append(len(part)), convolve_all(part))[1])
    encoder(random_frames(150, 4, 84, 84))
    assert sizes == [75, 75]
    assert encoder(random_frames(0, 4, 84, 84)).shape == (0, 8)


def test_in_float32_nothing_changes_but_rounding() -> None:
    encoder = NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    images = random_frames(100, 4, 84, 84)
    exact = NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8)).double()
    exact.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(images).double(), exact(images), rtol=1e-4, atol=1e-5)
