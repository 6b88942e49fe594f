"""A multi-layer perceptron on the CPU as one function with a gradient of its own.

What torch does layer by layer, with fewer and faster kernels: its CPU tanh takes five times as long as the
same by a sigmoid, its gradient of a first layer of few inputs is a matrix product of the wrong shape, and for
small networks most of the time is autograd's between the operators. See docs/adr/0020.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

# Up to here the transposed product is faster, or as fast.
_FEW_INPUTS = 32
_MINUS_ONE = torch.tensor(-1.0)


def tanh_of_half(x: Tensor) -> Tensor:
    """Return tanh(x/2) = 2 σ(x) − 1, ``[...]``, in place of x; within 2e-7 of it.

    For all sizes alike: what a batch gives must not depend on how it is divided.
    """
    return torch.add(_MINUS_ONE, x.sigmoid_(), alpha=2, out=x)


def fusible_tanh(x: Tensor) -> Tensor:
    """Return tanh(x) = 2 σ(2x) − 1, ``[...]``, for a compiler to fuse: its own tanh takes longer."""
    return 2 * torch.sigmoid(2 * x) - 1


class _Activation(NamedTuple):
    scale: int
    """Of what goes into it, which costs nothing in the product before."""
    apply: Callable[[Tensor], Tensor]
    """In place."""
    derive: Callable[[Tensor, Tensor], Tensor]
    """The gradient of what goes into it, unscaled, by that of what came out, and what came out."""


_ACTIVATIONS = {
    "tanh": _Activation(2, tanh_of_half, torch.ops.aten.tanh_backward),
    "relu": _Activation(
        1, torch.relu_, lambda gradient, out: torch.ops.aten.threshold_backward(gradient, out, 0)
    ),
}


def can_fuse(x: Tensor, activation: str) -> bool:
    """Whether :func:`mlp` can stand in for the layers: on the CPU, in full float32, tanh or ReLU.

    Args:
        x: What goes into the first layer.
        activation: After each layer.
    """
    return activation in _ACTIVATIONS and in_plain_float32(x)


def in_plain_float32(x: Tensor) -> bool:
    """Whether what follows from x is computed on the CPU in full float32."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def mlp(x: Tensor, parameters: Sequence[Tensor], activation: str) -> Tensor:
    """Apply linear layers, each followed by the activation.

    Args:
        x: ``[..., inputs]`` float32.
        parameters: weight ``[outputs, inputs]`` and bias ``[outputs]`` of each layer in turn.
        activation: "tanh" or "relu".

    Returns:
        ``[..., outputs]``.
    """
    flat = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        # Which finds the gradient by itself, and fuses what follows a product.
        out = _fusible(flat, activation, parameters)
    elif torch.is_grad_enabled():
        out = _MLP.apply(flat, activation, *parameters)  # type: ignore[no-untyped-call]
    else:
        out = _layers(flat, activation, parameters)[-1]
    return out.view(*x.shape[:-1], -1)


def _layers(x: Tensor, activation: str, parameters: Sequence[Tensor]) -> list[Tensor]:
    """What goes into the first layer, and what comes out of each."""
    scale, apply, _ = _ACTIVATIONS[activation]
    outs = [x]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        outs.append(apply(torch.addmm(bias, outs[-1], weight.t(), beta=scale, alpha=scale)))
    return outs


def _fusible(x: Tensor, activation: str, parameters: Sequence[Tensor]) -> Tensor:
    """The same in operators that do not write in place."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        if x.shape[1] < _FEW_INPUTS:
            # Of this one the gradient is the transposed product.
            x = torch.addmm(bias, x, weight.t().contiguous())
        else:
            x = linear(x, weight, bias)
        x = fusible_tanh(x) if activation == "tanh" else x.relu()
    return x


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        outs = _layers(x, activation, parameters)
        ctx.activation = activation  # type: ignore[attr-defined]
        ctx.save_for_backward(*outs, *parameters[::2])
        return outs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        derive = _ACTIVATIONS[ctx.activation].derive
        layers = len(ctx.saved_tensors) // 2
        outs, weights = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        gradients: list[Tensor] = []
        for layer in reversed(range(layers)):
            gradient = derive(gradient, outs[layer + 1])
            inputs = outs[layer]
            if inputs.shape[1] < _FEW_INPUTS:
                of_weight = (inputs.t() @ gradient).t().contiguous()
            else:
                of_weight = gradient.t() @ inputs
            gradients = [of_weight, gradient.sum(0), *gradients]
            if layer or ctx.needs_input_grad[0]:
                gradient = gradient @ weights[layer]
        return (gradient if ctx.needs_input_grad[0] else None), None, *gradients
