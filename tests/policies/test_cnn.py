import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import ImpalaCNN, NatureCNN, is_image
from puffer_lightning.policies.cnn import ImageEncoder, ResidualBlock

ENCODERS = [NatureCNN, ImpalaCNN]


def frames(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def random_frames(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (frames(4, 84, 84), True),
        (frames(210, 160, 3), True),
        (frames(1, 8, 8), True),
        (frames(16, 16), True),
        (frames(3, 7, 16), False),
        (frames(128), False),
        (frames(4, 84, 84, 3), False),
        (spaces.Box(0.0, 1.0, (3, 84, 84)), False),
        (spaces.Discrete(3), False),
        (spaces.Dict(a=frames(84, 84)), False),
    ],
)
def test_is_image(space: gym.Space[Any], expected: bool) -> None:
    assert is_image(space) is expected


@pytest.mark.parametrize("encoder_type", ENCODERS)
class TestBothNetworks:
    @pytest.mark.parametrize("shape", [(4, 84, 84), (36, 36, 3), (1, 16, 16), (35, 40), (3, 8, 8)])
    def test_reads_images_of_every_size(
        self, encoder_type: type[ImageEncoder], shape: tuple[int, ...]
    ) -> None:
        encoder = encoder_type(frames(*shape), hidden_size=32)
        features = encoder(random_frames(2, *shape))
        assert features.shape == (2, 32)
        assert encoder.num_features == 32
        assert (features[0] != features[1]).any()

    def test_uint8_frames_equal_frames_divided_by_255(self, encoder_type: type[ImageEncoder]) -> None:
        encoder = encoder_type(frames(3, 16, 16)).double()
        as_float = encoder_type(spaces.Box(0.0, 1.0, (3, 16, 16))).double()
        as_float.load_state_dict(encoder.state_dict())
        images = random_frames(4, 3, 16, 16)
        torch.testing.assert_close(encoder(images), as_float(images.double() / 255))

    def test_channels_last_equals_channels_first(self, encoder_type: type[ImageEncoder]) -> None:
        first = encoder_type(frames(3, 20, 16))
        last = encoder_type(frames(20, 16, 3))
        last.load_state_dict(first.state_dict())
        images = random_frames(4, 3, 20, 16)
        # The memory format changes the order of summation.
        torch.testing.assert_close(
            first(images), last(images.permute(0, 2, 3, 1).contiguous()), rtol=1e-3, atol=1e-3
        )
        assert first(images).abs().max() > 0.1

    def test_a_plain_matrix_is_one_channel(self, encoder_type: type[ImageEncoder]) -> None:
        matrix, channel = encoder_type(frames(16, 16)), encoder_type(frames(1, 16, 16))
        matrix.load_state_dict(channel.state_dict())
        images = random_frames(4, 16, 16)
        torch.testing.assert_close(matrix(images), channel(images.unsqueeze(1)))

    def test_weights_are_orthogonal_with_gain_root_2(self, encoder_type: type[ImageEncoder]) -> None:
        layers = [
            m for m in encoder_type(frames(3, 16, 16)).modules() if isinstance(m, nn.Conv2d | nn.Linear)
        ]
        assert len(layers) == {NatureCNN: 4, ImpalaCNN: 16}[encoder_type]
        for layer in layers:
            values = torch.linalg.svdvals(layer.weight.flatten(1))
            torch.testing.assert_close(values, torch.full_like(values, math.sqrt(2)))
            assert layer.bias is not None
            assert not layer.bias.any()

    def test_computes_in_the_dtype_of_its_weights(self, encoder_type: type[ImageEncoder]) -> None:
        encoder = encoder_type(frames(1, 16, 16)).bfloat16()
        assert encoder(random_frames(2, 1, 16, 16)).dtype == torch.bfloat16

    @pytest.mark.parametrize("space", [frames(3, 7, 7), frames(100), spaces.Discrete(2)])
    def test_refuses_what_is_no_image(self, encoder_type: type[ImageEncoder], space: gym.Space[Any]) -> None:
        with pytest.raises(ConfigurationError, match="sides of 8 or more"):
            encoder_type(space)

    def test_refuses_an_empty_linear_layer(self, encoder_type: type[ImageEncoder]) -> None:
        with pytest.raises(ConfigurationError, match="hidden_size cannot be 0"):
            encoder_type(frames(16, 16), 0)


def test_nature_cnn_has_the_published_size() -> None:
    # Mnih et al. 2015: 84 × 84 × 4 gives 7 × 7 × 64 before a layer of 512 units.
    encoder = NatureCNN(frames(4, 84, 84))
    assert encoder.linear.in_features == 7 * 7 * 64
    assert sum(p.numel() for p in encoder.parameters()) == 1_684_128


def test_impala_cnn_has_the_published_size() -> None:
    # Espeholt et al. 2018: 15 convolutions; three halvings of 84 leave 11 × 11 × 32.
    encoder = ImpalaCNN(frames(4, 84, 84), 256)
    assert sum(isinstance(m, nn.Conv2d) for m in encoder.modules()) == 15
    assert encoder.linear.in_features == 11 * 11 * 32


def test_residual_block_is_the_identity_without_its_weights() -> None:
    block, x = ResidualBlock(2), torch.randn(1, 2, 5, 5)
    assert not torch.equal(block(x), x)
    nn.init.zeros_(block.second.weight)
    assert torch.equal(block(x), x)
