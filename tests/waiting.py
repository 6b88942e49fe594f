"""Counting what would make the host wait for a GPU, on any device."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WaitsForTheDevice(TorchFunctionMode):
    """Counts what would make the host wait for a device: reading tensors, by Python or within an operator."""

    _READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:])
        )
        if name in self._READS or by_mask:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


class ReadsOfScalars(TorchDispatchMode):
    """The same below Python: operators that must know what a tensor holds."""

    _READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(name.startswith(read) for read in self._READS):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))
