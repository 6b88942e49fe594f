import math

import pytest
import torch
from torch import nn

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.initialization import check_positive, orthogonal


@pytest.mark.parametrize("layer", [nn.Linear(9, 5), nn.Linear(5, 9), nn.Conv2d(3, 8, 3)])
def test_singular_values_are_the_gain_and_biases_zero(layer: nn.Linear | nn.Conv2d) -> None:
    assert orthogonal(layer) is layer
    singular_values = torch.linalg.svdvals(layer.weight.flatten(1))
    torch.testing.assert_close(singular_values, torch.full_like(singular_values, math.sqrt(2)))
    assert layer.bias is not None
    assert not layer.bias.any()


@pytest.mark.parametrize("sizes", [(), (0,), (64, -1)])
def test_networks_without_units_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="hidden_sizes"):
        check_positive("hidden_sizes", *sizes)
    check_positive("hidden_sizes", 1, 64)
