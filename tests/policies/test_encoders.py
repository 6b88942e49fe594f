import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import nn

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import MLPEncoder
from puffer_lightning.policies.encoders import FlatObservations

UNIT = spaces.Box(-1.0, 1.0, (4,))


def flatten(space: gym.Space[Any], observations: torch.Tensor) -> torch.Tensor:
    flat: torch.Tensor = FlatObservations(space)(observations, torch.float32)
    return flat


class TestFlatObservations:
    @pytest.mark.parametrize(
        "space",
        [
            UNIT,
            spaces.Box(-1.0, 1.0, (), np.float64),
            spaces.Box(-5, 5, (2, 3, 2), np.int32),
            spaces.Discrete(5, start=-2),
            spaces.MultiDiscrete([3, 2], start=[1, 5]),
            spaces.MultiDiscrete([[3, 2], [4, 5]]),
            spaces.MultiBinary(4),
            spaces.MultiBinary((2, 3)),
        ],
    )
    def test_agrees_with_gymnasium_flatten(self, space: gym.Space[Any]) -> None:
        batched = batch_space(space, 6)
        batched.seed(0)
        batch = batched.sample()
        expected = np.stack([spaces.flatten(space, observation) for observation in batch])
        flat = flatten(space, torch.from_numpy(batch))
        assert flat.dtype == torch.float32
        np.testing.assert_allclose(flat.numpy(), expected.astype(np.float32))
        assert FlatObservations(space).num_features == expected.shape[1]

    @pytest.mark.parametrize("space", [UNIT, spaces.Discrete(3), spaces.MultiDiscrete([3, 2])])
    def test_takes_any_leading_dimensions(self, space: gym.Space[Any]) -> None:
        shape = space.shape or ()
        observations = torch.ones(2, 5, *shape, dtype=torch.int64)
        both = flatten(space, observations)
        assert both.shape[:2] == (2, 5)
        assert torch.equal(both[1], flatten(space, observations[1]))
        assert flatten(space, observations[:0]).shape == (0, *both.shape[1:])

    def test_uint8_is_scaled_by_its_upper_bound(self) -> None:
        memory = spaces.Box(0, 255, (2,), np.uint8)
        assert flatten(memory, torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[0.0, 1.0]]
        bits = spaces.Box(0, 1, (2,), np.uint8)
        assert flatten(bits, torch.tensor([[0, 1]], dtype=torch.uint8)).tolist() == [[0.0, 1.0]]

    @pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(UNIT), spaces.Graph(UNIT, None)])
    def test_other_spaces_are_refused_by_name(self, space: gym.Space[Any]) -> None:
        for nested in (space, spaces.Dict(a=UNIT, b=spaces.Tuple([space]))):
            with pytest.raises(ConfigurationError, match=f"^{type(space).__name__} observation spaces"):
                MLPEncoder(nested)

    @pytest.mark.parametrize("space", [spaces.Dict(), spaces.Dict(action_mask=spaces.MultiBinary(3))])
    def test_nothing_to_observe_is_refused(self, space: gym.Space[Any]) -> None:
        with pytest.raises(ConfigurationError, match="nothing to observe"):
            MLPEncoder(space)


class TestMLPEncoder:
    @pytest.mark.parametrize(
        ("activation", "function"),
        [
            ("tanh", torch.tanh),
            ("relu", torch.relu),
            ("gelu", nn.functional.gelu),
            ("silu", nn.functional.silu),
        ],
    )
    def test_computes_layers_and_activations(self, activation: Any, function: Any) -> None:
        encoder = MLPEncoder(UNIT, (7, 3), activation)
        first, _, second, _ = encoder.layers
        x = torch.randn(5, 4)
        features = encoder(x)
        torch.testing.assert_close(features, function(second(function(first(x)))))
        assert features.shape[1] == encoder.num_features == 3

    def test_weights_are_orthogonal_with_gain_root_2(self) -> None:
        for layer in MLPEncoder(UNIT, (64, 64)).layers[::2]:
            assert isinstance(layer, nn.Linear)
            values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(values, torch.full_like(values, math.sqrt(2)))
            assert not layer.bias.any()

    def test_computes_in_the_dtype_of_its_weights(self) -> None:
        encoder = MLPEncoder(UNIT).bfloat16()
        assert encoder(torch.zeros(2, 4, dtype=torch.float64)).dtype == torch.bfloat16

    def test_refuses_what_it_does_not_know(self) -> None:
        with pytest.raises(ConfigurationError, match=r"activation 'swish'.*tanh, relu"):
            MLPEncoder(UNIT, activation="swish")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="hidden_sizes"):
            MLPEncoder(UNIT, ())
