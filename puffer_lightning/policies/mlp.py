"""A multi-layer perceptron on the CPU as one function with a gradient of its own.

What torch does layer by layer, with fewer and faster kernels: its CPU tanh takes five times as long as the
same by a sigmoid, its gradient of a first layer of few inputs is a matrix product of the wrong shape, and for
small networks most of the time is autograd's between the operators. See docs/adr/0020.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Below, one kernel is faster than four.
_FEW_ELEMENTS = 4096
# Up to here the transposed product is faster, or as fast.
_FEW_INPUTS = 32


def fast_tanh(x: Tensor) -> Tensor:
    """Return tanh x = 2 σ(2x) − 1, ``[...]``, in place where that is faster; within 2e-7 of it."""
    if x.numel() < _FEW_ELEMENTS:
        return x.tanh_()
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)


# The activation, in place, and the gradient of what goes into it by that of what came out, and what came out.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "tanh": (fast_tanh, torch.ops.aten.tanh_backward),
    "relu": (torch.relu_, lambda gradient, out: torch.ops.aten.threshold_backward(gradient, out, 0)),
}


def can_fuse(x: Tensor, activation: str) -> bool:
    """Whether :func:`mlp` can stand in for the layers: on the CPU, in full float32, tanh or ReLU.

    Args:
        x: What goes into the first layer.
        activation: After each layer.
    """
    return (
        activation in _ACTIVATIONS
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


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
    if torch.is_grad_enabled():
        out: Tensor = _MLP.apply(flat, activation, *parameters)  # type: ignore[no-untyped-call]
    else:
        out = _layers(flat, activation, parameters)[-1]
    return out.view(*x.shape[:-1], -1)


def _layers(x: Tensor, activation: str, parameters: Sequence[Tensor]) -> list[Tensor]:
    """What goes into the first layer, and what comes out of each."""
    activate, _ = _ACTIVATIONS[activation]
    outs = [x]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        outs.append(activate(torch.addmm(bias, outs[-1], weight.t())))
    return outs


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
        _, derive = _ACTIVATIONS[ctx.activation]
        layers = len(ctx.saved_tensors) // 2
        outs, weights = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        gradients: list[Tensor] = []
        for layer in reversed(range(layers)):
            gradient = derive(gradient, outs[layer + 1])
            inputs = outs[layer]
            if inputs.shape[1] < _FEW_INPUTS:
                of_weight = (inputs.t() @ gradient).t()
            else:
                of_weight = gradient.t() @ inputs
            gradients = [of_weight, gradient.sum(0), *gradients]
            if layer or ctx.needs_input_grad[0]:
                gradient = gradient @ weights[layer]
        return (gradient if ctx.needs_input_grad[0] else None), None, *gradients
