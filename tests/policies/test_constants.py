import numpy as np
import torch

from puffer_lightning.policies.constants import Constant, torch_dtype

CPU, META = torch.device("cpu"), torch.device("meta")


def test_keeps_values_dtype_and_its_own_memory() -> None:
    array = np.array([1, 2, 3], np.int32)
    constant = Constant(array)
    array[0] = 9
    assert constant.on(CPU).tolist() == [1, 2, 3]
    assert constant.on(CPU).dtype == torch.int32


def test_copies_only_when_the_device_changes() -> None:
    constant = Constant(np.ones(2))
    assert constant.on(CPU) is constant.on(CPU)
    assert constant.on(META) is constant.on(META)
    assert constant.on(META).device == META
    assert constant.on(CPU).tolist() == [1, 1]


def test_is_real_when_built_under_the_meta_device() -> None:
    with META:
        constant = Constant(np.array([0.5]))
    assert constant.on(CPU).tolist() == [0.5]


def test_torch_dtype() -> None:
    assert torch_dtype(np.uint8) == torch.uint8
    assert torch_dtype(np.dtype("float64")) == torch.float64
