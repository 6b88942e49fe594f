from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from puffer_lightning.ppo.graphs import Graph, tensors_in
from tests.compiling import needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("forget_compiled")]

Arguments = dict[str, Any]


def linear(layer: nn.Module, given: Arguments, twice: bool) -> Arguments:
    out = layer(given["x"]) + given["y"]
    return {"out": 2 * out if twice else out, "sum": out.sum()}


def two(seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=generator) for name in ("x", "y")}


@torch.no_grad()
def test_calls_with_other_tensors_and_other_parameters_give_what_the_function_gives() -> None:
    layer, graph = nn.Linear(4, 4), Graph(linear, "this")
    for seed in range(3):
        given = two(seed)
        leaves = graph(tensors_in(given), layer, given, True)
        assert leaves is not None
        found = torch.utils._pytree.tree_unflatten(leaves, graph.spec)
        assert_close(found, linear(layer, given, True))
        layer.weight.mul_(2.0)
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    leaves = graph(tensors_in(given), layer, given, True)
    assert leaves is not None
    assert_close(torch.utils._pytree.tree_unflatten(leaves, graph.spec), linear(layer, given, True))


@torch.no_grad()
def test_after_the_first_call_nothing_of_torch_compile_is_run() -> None:
    layer, graph, given = nn.Linear(4, 4), Graph(linear, "this"), two(0)
    first = graph(tensors_in(given), layer, given, False)
    with torch.compiler.set_stance("fail_on_recompile"):
        # The arguments themselves are not even looked at.
        again = graph(tensors_in(given), None, None)
    assert_close(again, first)


@torch.no_grad()
def test_functions_of_one_code_do_not_mix() -> None:
    layers = [nn.Linear(4, 4) for _ in range(12)]
    graphs, given = [Graph(linear, "this") for _ in layers], two(0)
    for _ in range(2):
        for layer, graph in zip(layers, graphs, strict=True):
            leaves = graph(tensors_in(given), layer, given, False)
            assert leaves is not None
            assert_close(leaves[0], linear(layer, given, False)["out"])


def same_again(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x) + y, x.view(-1)


@torch.no_grad()
def test_what_torch_does_around_a_graph_is_done() -> None:
    # The second result is a view of an argument, which is made outside of the graph.
    layer, graph = nn.Linear(4, 4), Graph(same_again, "this")
    for seed in range(3):
        x, y = two(seed).values()
        leaves = graph((x, y), layer, x, y)
        assert leaves is not None
        assert_close(leaves, [*same_again(layer, x, y)])
        assert leaves[1].data_ptr() == x.data_ptr()


def add_in_place(layer: nn.Module, total: Tensor, x: Tensor) -> Tensor:
    total.add_(layer(x))
    return total.sum()


@torch.no_grad()
def test_changes_what_the_function_changes() -> None:
    layer, graph = nn.Linear(4, 4), Graph(add_in_place, "this")
    total, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    for seed in range(3):
        x = two(seed)["x"]
        [found] = graph((total, x), layer, total, x) or []
        assert_close(found, add_in_place(layer, expected, x))
        assert_close(total, expected)


@torch.no_grad()
def test_a_tensor_in_two_places_is_read_in_both() -> None:
    layer, graph, x = nn.Linear(4, 4), Graph(linear, "this"), torch.randn(3, 4)
    graph((x, x), layer, {"x": x, "y": x}, False)
    given = two(0)
    leaves = graph(tensors_in(given), layer, given, False)
    assert leaves is not None
    assert_close(leaves[0], linear(layer, given, False)["out"])
