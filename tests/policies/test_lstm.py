"""The LSTM with a gradient of its own is the one that torch's cells make."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.testing import assert_close

from puffer_lightning.policies import LSTMPolicy
from puffer_lightning.policies.lstm import State, lstm, lstm_step

INPUTS, HIDDEN = 3, 5


def make_cell(inputs: int = INPUTS, hidden: int = HIDDEN, dtype: torch.dtype = torch.float64) -> nn.LSTMCell:
    torch.manual_seed(0)
    return nn.LSTMCell(inputs, hidden, dtype=dtype)


def make_sequences(
    steps: int, num: int, cell: nn.LSTMCell, ending: float = 0.3
) -> tuple[Tensor, State, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=cell.weight_ih.dtype, requires_grad=True)

    state = draw(num, cell.hidden_size), draw(num, cell.hidden_size)
    return draw(steps, num, cell.input_size), state, torch.rand(steps, num) < ending


def by_cells(x: Tensor, state: State, started: Tensor, cell: nn.LSTMCell) -> tuple[Tensor, State]:
    outputs = []
    for features, begins in zip(x, started, strict=True):
        state = cell(features, state)
        outputs.append(state[0])
        output, memory = (leaf.where(~begins.unsqueeze(1), 0.0) for leaf in state)
        state = output, memory
    return torch.stack(outputs), state


def everything(function: Any, x: Tensor, state: State, started: Tensor, cell: nn.LSTMCell) -> list[Tensor]:
    """Outputs, and the gradients of all that has one."""
    outputs, after = function(x, state, started, cell)
    of = (x, *state, *cell.parameters())
    total = sum((weight + 1) * part.square().sum() for weight, part in enumerate((outputs, *after)))
    return [outputs, *after, *torch.autograd.grad(total, of)]


def fused(x: Tensor, state: State, started: Tensor, cell: nn.LSTMCell) -> tuple[Tensor, State]:
    return lstm(x, state, started, tuple(cell.parameters()))


def test_parameters_are_in_the_order_of_torch() -> None:
    names = [name for name, _ in make_cell().named_parameters()]
    assert names == ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


@pytest.mark.parametrize("ending", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_function(ending: float) -> None:
    cell = make_cell()
    x, state, started = make_sequences(4, 3, cell, ending)

    def flat(x: Tensor, output: Tensor, memory: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, after = lstm(x, (output, memory), started, parameters)
        return outputs, *after

    assert torch.autograd.gradcheck(flat, (x, *state, *cell.parameters()))


@pytest.mark.parametrize(("steps", "num"), [(1, 1), (1, 6), (7, 1), (20, 40)])
def test_it_is_one_cell_after_the_other(steps: int, num: int) -> None:
    cell = make_cell()
    sequences = make_sequences(steps, num, cell)
    for ours, theirs in zip(
        everything(fused, *sequences, cell), everything(by_cells, *sequences, cell), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_in_float32_it_is_so_to_rounding() -> None:
    cell = make_cell(32, 64, torch.float32)
    sequences = make_sequences(32, 50, cell, 0.05)
    for ours, theirs in zip(
        everything(fused, *sequences, cell), everything(by_cells, *sequences, cell), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.detach().abs().max()))


@torch.no_grad()
def test_a_step_is_that_of_a_cell() -> None:
    for dtype, atol in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        cell = make_cell(dtype=dtype)
        x, state, _ = make_sequences(1, 30, cell)
        before = [leaf.clone() for leaf in (x, *state)]
        assert_close(lstm_step(x[0], state, tuple(cell.parameters())), cell(x[0], state), rtol=0, atol=atol)
        assert_close([x, *state], before, rtol=0, atol=0)


def test_a_backward_pass_can_be_repeated() -> None:
    cell = make_cell()
    x, state, started = make_sequences(6, 4, cell)
    total = fused(x, state, started, cell)[0].square().sum()
    of = (x, *state, *cell.parameters())
    first, second = (torch.autograd.grad(total, of, retain_graph=True) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)


def test_what_is_not_finite_ends_with_its_episode() -> None:
    cell = make_cell()
    x, state, _ = make_sequences(5, 2, cell)
    started = torch.zeros(5, 2, dtype=torch.bool)
    started[2, 0] = True
    spoiled = x.detach().clone()
    spoiled[1, 0] = float("nan")
    outputs, _ = fused(spoiled, state, started, cell)
    finite = outputs.isfinite().all(-1)
    assert finite.tolist() == [[True, True], [False, True], [False, True], [True, True], [True, True]]


def test_a_frozen_weight_stays_frozen() -> None:
    cell = make_cell()
    cell.weight_ih.requires_grad_(False)
    x, state, started = make_sequences(3, 2, cell)
    fused(x.detach(), state, started, cell)[0].sum().backward()
    assert cell.weight_ih.grad is None
    assert cell.weight_hh.grad is not None


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    cell = make_cell()
    x, state, started = make_sequences(3, 2, cell)
    parameters = tuple(cell.parameters())
    gradients = torch.autograd.grad(fused(x, state, started, cell)[0].sum(), parameters)
    assert [gradient.stride() for gradient in gradients] == [part.stride() for part in parameters]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_policy_computes_the_same_with_torch_cells(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own way on the CPU in float32, and by torch's cells elsewhere, such as with autocasting."""
    torch.manual_seed(0)
    policy = LSTMPolicy(spaces.Box(-1, 1, (INPUTS,), np.float32), spaces.Discrete(2))
    calls: list[Any] = []
    policy.memory.register_forward_hook(lambda *_: calls.append(_))
    monkeypatch.setattr("puffer_lightning.policies.recurrent.in_plain_float32", lambda x: not elsewhere)
    observations, started = torch.randn(6, 4, INPUTS), torch.rand(6, 4) < 0.3
    state = policy.initial_state(4)
    params, values, after = policy(observations, state, started)
    features = policy.encoder(observations)
    outputs, expected = by_cells(features, state, started, policy.memory)
    assert len(calls) == 6 * (1 + elsewhere)
    assert_close((params, after), (policy.head(outputs), expected), rtol=0, atol=1e-6)
    gradients = [
        torch.autograd.grad(
            of.square().sum(), list(policy.encoder.parameters()) + list(policy.memory.parameters())
        )
        for of in (values, policy.critic(outputs).squeeze(-1))
    ]
    assert_close(*gradients, rtol=1e-4, atol=1e-5)
