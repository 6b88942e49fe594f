"""The multi-layer perceptron with a gradient of its own is the one that torch's layers make."""

from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from puffer_lightning.policies.encoders import MLPEncoder
from puffer_lightning.policies.mlp import can_fuse, mlp, tanh_of_half

SIZES = (3, 40, 5)


def make_parameters(dtype: torch.dtype, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for inputs, outputs in pairwise(sizes)
        for shape in ((outputs, inputs), (outputs,))
    ]


def by_layers(x: Tensor, parameters: list[Tensor], activation: str) -> Tensor:
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = getattr(torch, activation)(nn.functional.linear(x, weight, bias))
    return x


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000])
def test_tanh(size: int) -> None:
    x = torch.linspace(-20, 20, size)
    assert torch.allclose(tanh_of_half(2 * x), x.double().tanh().float(), rtol=0, atol=2e-7)


def test_tanh_of_what_is_not_finite() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(2000)
    assert torch.allclose(tanh_of_half(2 * x), x.tanh(), equal_nan=True)


def test_a_row_is_the_same_in_a_batch_of_any_size() -> None:
    x, parameters = torch.randn(2000, 3), make_parameters(torch.float32, (3, 64, 64))
    parts = torch.cat([mlp(part, parameters, "tanh") for part in x.split(7)])
    assert torch.allclose(mlp(x, parameters, "tanh"), parts, rtol=0, atol=5e-7)


@pytest.mark.parametrize("rows", [2, 200])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_gradient_is_that_of_the_function(activation: str, rows: int) -> None:
    x = torch.randn(rows, SIZES[0], dtype=torch.float64).requires_grad_()
    if rows == 2:
        parameters = make_parameters(torch.float64)
        assert torch.autograd.gradcheck(lambda x, *p: mlp(x, list(p), activation), (x, *parameters))
    outcomes = []
    for function in (mlp, by_layers):
        parameters = make_parameters(torch.float64)
        x.grad = None
        out = function(x, parameters, activation)
        out.square().sum().backward()
        outcomes.append([out, x.grad, *(parameter.grad for parameter in parameters)])
    for ours, theirs in zip(*outcomes, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("leading", [(), (7,), (4, 300)])
def test_observations_have_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    encoder = MLPEncoder(gym.spaces.Box(-1, 1, (3,), np.float32), (64, 32))
    x = torch.randn(*leading, 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = encoder(x)
        assert out.shape == (*leading, 32)
        assert out.requires_grad == grad
        assert torch.allclose(out, encoder.layers(x), atol=1e-6)


def test_a_frozen_layer_stays_frozen() -> None:
    parameters = make_parameters(torch.float32)
    parameters[0].requires_grad_(False)
    mlp(torch.randn(5, 3), parameters, "tanh").sum().backward()
    assert parameters[0].grad is None
    assert all(parameter.grad is not None for parameter in parameters[1:])


def test_elsewhere_the_layers_compute() -> None:
    x = torch.randn(2, 3)
    assert can_fuse(x, "tanh")
    assert not can_fuse(x, "gelu")
    assert not can_fuse(x.double(), "tanh")
    assert not can_fuse(x.to("meta"), "tanh")
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_fuse(x, "tanh")


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    parameters = make_parameters(torch.float32)
    gradients = torch.autograd.grad(mlp(torch.randn(9, 3), parameters, "tanh").sum(), parameters)
    assert [gradient.stride() for gradient in gradients] == [part.stride() for part in parameters]
