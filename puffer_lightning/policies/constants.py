"""Fixed arrays (bounds, offsets, masks) that networks need on their own device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Constant:
    """A fixed array as a tensor, copied to another device when one asks for it.

    A buffer would not do: ``module.bfloat16()`` would round the bounds of an action space, and building the
    module on the meta device and materialising it later would leave a non-persistent buffer undefined.

    Args:
        array: the values; their dtype is kept.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._original = torch.from_numpy(np.array(array))
        self._latest = self._original

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on ``device``; only a change of device copies."""
        if self._latest.device != device:
            self._latest = self._original.to(device)
        return self._latest


def torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    """Return the torch dtype of a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
