"""Functions of tensors as graphs that are called with nothing in between.

``torch.compile`` looks up a module's parameters, checks what the function was compiled for and passes through
half a dozen wrappers at each call. For small networks that takes longer than the graph. See docs/adr/0027.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map


class Graph:
    """A function compiled for what it is called with first; whoever calls it sees to it that nothing differs.

    What cannot be compiled, or where there is no compiler, is not done, and a warning says so.

    Args:
        function: Has neither defaults nor a closure. Its first argument is a module, whose parameters and
            buffers may be exchanged for others of their kind.
        what: What it does, for the warning.

    Attributes:
        spec: How the function nests what it returns, once it was called.
    """

    spec: TreeSpec

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        # Code of its own: torch keeps what it compiled, and counts how often, by code.
        self._function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._what = what
        self._compiled: Callable[..., Any] | None = None
        self._inner: _Inner | None = None
        self._failed = False

    def __call__(self, tensors: Sequence[Tensor], *arguments: Any) -> list[Any] | None:
        """What the function returns, flat, or None, and nothing is done, if it cannot be compiled.

        Args:
            tensors: All that are in the arguments, in the order of ``tree_leaves``.
            arguments: Those of the function.
        """
        if self._inner is not None:
            return self._inner.straight(tensors)
        if self._compiled is not None:
            return tree_leaves(self._compiled(*arguments))
        return None if self._failed else self._first(*arguments)

    def _first(self, *arguments: Any) -> list[Any] | None:
        arguments = _distinct(arguments)
        seen: list[_Inner] = []
        # On CPUs a graph's own entry in C++ takes half as long as the one in Python.
        on_cpu = all(parameter.device.type == "cpu" for parameter in arguments[0].parameters())

        def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            # Not before it is needed: this takes a second.
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def compile_inner(*given: Any, **options: Any) -> Any:
                seen.append(_Inner(compile_fx_inner(*given, **options)))
                return seen[-1]

            options: Any = {"inner_compile": compile_inner, "config_patches": {"cpp_wrapper": on_cpu}}
            # Inductor's own cache is what saves time; this one would pass over what is to be observed.
            with functorch_config.patch(enable_autograd_cache=False):
                return cast(Callable[..., Any], compile_fx(graph, examples, **options))

        try:
            with torch.no_grad():
                compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=backend)
                result = compiled(*arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as failure:
            self._failed = True
            reason = str(failure).strip().splitlines()[0]
            warnings.warn(f"compile: {self._what} goes on without being compiled: {reason}", stacklevel=4)
            return None
        self._compiled = compiled
        leaves, self.spec = tree_flatten(result)
        if len(seen) == 1 and seen[0].bind(arguments, leaves):
            self._inner = seen[0]
        # Compiling leaves millions of objects behind, which would be collected amid training.
        gc.collect()
        return leaves


class _Inner:
    """What Inductor made of a graph: takes a list of tensors, which it empties, and returns some.

    Until ``bind`` it remembers what it was called with, and what it returned.
    """

    _boxed_call = True  # how torch asks whether lists may be emptied

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._watching = True
        self._inputs: list[Any] = []
        self._outputs: Sequence[Any] = ()

    def __call__(self, inputs: list[Any]) -> Any:
        if not self._watching:
            return self._compiled(inputs)
        self._inputs = [*inputs]
        self._outputs = self._compiled(inputs)
        return self._outputs

    def bind(self, arguments: Any, results: list[Any]) -> bool:
        """Find out where its inputs come from and its outputs go to.

        Returns:
            Whether all of them are tensors of the arguments, of the module, or results. If not, torch does
            something before or after the graph, such as making views.
        """
        given = {id(tensor): at for at, tensor in enumerate(tensors_in(arguments))}
        owned = {
            id(tensor): (of, name)
            for module in arguments[0].modules()
            for of in (module._parameters, module._buffers)
            for name, tensor in of.items()
        }
        returned = {id(output): at for at, output in enumerate(self._outputs)}
        self._given = [
            (place, given[id(tensor)]) for place, tensor in enumerate(self._inputs) if id(tensor) in given
        ]
        self._owned = [
            (place, *owned[id(tensor)])
            for place, tensor in enumerate(self._inputs)
            if id(tensor) in owned and id(tensor) not in given
        ]
        known = len(self._given) + len(self._owned) == len(self._inputs)
        bound = known and all(id(result) in returned for result in results)
        if bound:
            self._places = [returned[id(result)] for result in results]
            # Without the profiler's and the debugger's part of it.
            self._run = getattr(self._compiled, "current_callable", None) or self._compiled
        self._empty: list[Any] = [None] * len(self._inputs)
        self._watching, self._inputs, self._outputs = False, [], ()
        return bound

    def straight(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call it with the tensors of other arguments, once it is bound; returns the results."""
        inputs = self._empty.copy()
        for place, at in self._given:
            inputs[place] = tensors[at]
        for place, of, name in self._owned:
            inputs[place] = of[name]
        outputs = self._run(inputs)
        return [outputs[place] for place in self._places]


def tensors_in(arguments: Any) -> list[Tensor]:
    """All tensors of a pytree."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _distinct(arguments: Any) -> Any:
    """The arguments, each tensor once: of one that is in two places, the graph would read only the first."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        again = isinstance(leaf, Tensor) and id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if again else leaf

    return tree_map(once, arguments)
