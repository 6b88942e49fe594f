"""A long short-term memory on the CPU as one function with a gradient of its own.

What ``nn.LSTMCell`` does step by step, with fewer and faster kernels: all gates by one sigmoid, none by
torch's CPU tanh, nothing of autograd's between the operators, and the gradients of the weights added up in
place, step by step, while what they follow from is in the processor's caches. See docs/adr/0029.

The gates are kept in the order input, forget, output, cell, so that the three sigmoids lie side by side. The
cell gate's weights are doubled, and so is the cell while it is within: tanh(x) = 2 σ(2x) − 1 is then one
sigmoid and one sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from puffer_lightning.policies.mlp import fusible_tanh, tanh_of_half

State = tuple[Tensor, Tensor]
"""Output and cell, ``[N, hidden]`` each."""

_MINUS_ONE, _ZERO = torch.tensor(-1.0), torch.tensor(0.0)


def lstm(x: Tensor, state: State, started: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, State]:
    """Apply a long short-term memory along sequences.

    ::

        i, f, o = σ(W x_t + U h_{t−1} + b),  g = tanh(W x_t + U h_{t−1} + b), with weights of their own each
        c_t = f c_{t−1} + i g
        h_t = o tanh(c_t)

    Source: Gers, Schmidhuber and Cummins 2000 (doi:10.1162/089976600300015015).

    Differentiable once, with respect to the state, too.

    Args:
        x: ``[T, N, inputs]``.
        state: The state before the first step.
        started: ``[T, N]`` bool, the state is 0 after the step.
        parameters: ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh`` of ``nn.LSTMCell``.

    Returns:
        Outputs h ``[T, N, hidden]``, and the state after the last step.
    """
    outputs, output, cell = _LSTM.apply(x, *state, started, *parameters)  # type: ignore[no-untyped-call]
    return outputs, (output, cell)


def lstm_step(x: Tensor, state: State, parameters: Sequence[Tensor]) -> State:
    """Make one step, without gradients: the state after it.

    Args:
        x: ``[N, inputs]``.
        state: The state before it.
        parameters: See :func:`lstm`.
    """
    weight_ih, weight_hh, bias_ih, bias_hh = parameters
    output, cell = state
    gates = torch.addmm(bias_ih + bias_hh, x, weight_ih.t()).addmm_(output, weight_hh.t())
    i, f, g, o = gates.chunk(4, 1)
    if torch.compiler.is_compiling():
        # A compiler makes one function of all that follows, but not of what is done in place.
        cell = f.sigmoid() * cell + i.sigmoid() * fusible_tanh(g)
        return o.sigmoid() * fusible_tanh(cell), cell
    g.mul_(2)
    gates.sigmoid_()
    torch.add(_MINUS_ONE, g, alpha=2, out=g)
    cell = torch.mul(f, cell).addcmul_(i, g)
    return tanh_of_half(2 * cell).mul_(o), cell


def _arrange(weight: Tensor) -> Tensor:
    """Rows of input, forget, cell and output gate as they are needed here."""
    i, f, g, o = weight.chunk(4)
    return torch.cat((i, f, o, 2 * g))


def _arrange_back(gradient: Tensor) -> Tensor:
    """The gradient of what was arranged, by that of what came of it."""
    i, f, o, g = gradient.chunk(4)
    return torch.cat((i, f, 2 * g, o))


def _by_step(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of each step, of each tensor: looked up once, as that costs as much as to compute."""
    return [tensor.unbind() for tensor in tensors]


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, output: Tensor, cell: Tensor, started: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight_ih, weight_hh, bias_ih, bias_hh = parameters
        weights, bias = (_arrange(weight_ih), _arrange(weight_hh)), _arrange(bias_ih + bias_hh)
        of_x, of_output = (weight.t().contiguous() for weight in weights)
        steps, (num, hidden) = len(x), output.shape
        # Where an episode begins, rows are put back to 0 one by one: a mask costs as much as a gate.
        restarts = torch.split(started.nonzero()[:, 1], started.sum(1).tolist())
        # What went into each step, then what came out of it.
        before, cells = x.new_empty(steps + 1, num, hidden), x.new_empty(steps + 1, num, hidden)
        gates, tanhs, outputs = (x.new_empty(steps, num, n * hidden) for n in (4, 1, 1))
        before[0] = output
        torch.mul(cell, 2, out=cells[0])
        xs, hs, cs, all_gates, tanh, outs = _by_step(x, before, cells, gates, tanhs, outputs)
        i, f, o, g = _by_step(*gates.chunk(4, -1))
        # The products go to memory that stays in the caches.
        sums = torch.empty_like(gates[0])
        for t in range(steps):
            torch.addmm(bias, xs[t], of_x, out=sums).addmm_(hs[t], of_output)
            torch.sigmoid(sums, out=all_gates[t])
            torch.add(_MINUS_ONE, g[t], alpha=2, out=g[t])
            next_cell = torch.mul(f[t], cs[t], out=cs[t + 1]).addcmul_(i[t], g[t], value=2)
            torch.add(_MINUS_ONE, torch.sigmoid(next_cell, out=tanh[t]), alpha=2, out=tanh[t])
            next_output = hs[t + 1].copy_(torch.mul(o[t], tanh[t], out=outs[t]))
            if len(restarts[t]):
                next_cell.index_fill_(0, restarts[t], 0.0)
                next_output.index_fill_(0, restarts[t], 0.0)
        ctx.restarts = restarts  # type: ignore[attr-defined]
        ctx.save_for_backward(x, before, cells, gates, tanhs, *weights)
        return outputs, before[-1].clone(), cells[-1] / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor, of_output: Tensor, of_cell: Tensor) -> tuple[Any, ...]:
        x, before, cells, gates, tanhs, weight_ih, weight_hh = ctx.saved_tensors
        tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward
        of_gates, of_x = torch.empty_like(gates[0]), torch.empty_like(x)
        of_i, of_f, of_o, of_g = of_gates.chunk(4, 1)
        three = slice(3 * before.shape[2])
        of_sigmoids = of_gates[:, three]
        of_weight_ih, of_weight_hh = torch.zeros_like(weight_ih), torch.zeros_like(weight_hh)
        of_bias, ones = x.new_zeros(len(weight_ih)), x.new_ones(x.shape[1])
        of_output, of_cell = of_output.clone(), of_cell / 2
        xs, of_xs, hs, cs, tanh, of_outs = _by_step(x, of_x, before, cells, tanhs, of_outputs)
        i, f, o, g, sigmoids = _by_step(*gates.chunk(4, -1), gates[..., three])
        for t in reversed(range(len(x))):
            if len(ctx.restarts[t]):
                of_output.index_fill_(0, ctx.restarts[t], 0.0)
                of_cell.index_fill_(0, ctx.restarts[t], 0.0)
            of_output.add_(of_outs[t])
            torch.mul(of_output, tanh[t], out=of_o)
            tanh_backward(of_output, tanh[t], grad_input=of_output)
            of_cell.addcmul_(of_output, o[t], value=0.5)
            torch.addcmul(_ZERO, of_cell, g[t], value=2, out=of_i)
            torch.mul(of_cell, cs[t], out=of_f)
            torch.mul(of_cell, i[t], out=of_g)
            sigmoid_backward(of_sigmoids, sigmoids[t], grad_input=of_sigmoids)
            tanh_backward(of_g, g[t], grad_input=of_g)
            of_cell.mul_(f[t])
            torch.mm(of_gates, weight_hh, out=of_output)
            torch.mm(of_gates, weight_ih, out=of_xs[t])
            of_weight_ih.addmm_(of_gates.t(), xs[t])
            of_weight_hh.addmm_(of_gates.t(), hs[t])
            of_bias.addmv_(of_gates.t(), ones)
        of_parameters = map(_arrange_back, (of_weight_ih, of_weight_hh, of_bias))
        of_weight_ih, of_weight_hh, of_bias = of_parameters
        return of_x, of_output, 2 * of_cell, None, of_weight_ih, of_weight_hh, of_bias, of_bias
