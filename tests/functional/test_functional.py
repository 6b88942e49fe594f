"""What holds for the room as a whole."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from puffer_lightning import functional


def calls(device: str) -> dict[str, Callable[[], object]]:
    """One call of every tensor function of the room, with all its inputs on the device."""
    x = torch.ones(6, 4, device=device)
    flags = torch.zeros(6, 4, dtype=torch.bool, device=device)
    sums = torch.ones(3, dtype=torch.float64, device=device)
    return {
        "approx_kl": lambda: functional.approx_kl(x),
        "clip_fraction": lambda: functional.clip_fraction(x, 0.2),
        "clipped_surrogate": lambda: functional.clipped_surrogate(x, x, 0.2),
        "explained_variance": lambda: functional.explained_variance(x, x, flags),
        "explained_variance_from_sums": lambda: functional.explained_variance_from_sums(
            torch.ones(5, dtype=torch.float64, device=device)
        ),
        "explained_variance_sums": lambda: functional.explained_variance_sums(x, x, flags),
        "gae": lambda: functional.gae(x, x, x, flags, flags, 0.99, 0.95, valid=flags),
        "masked_sums": lambda: functional.masked_sums(x, flags),
        "mean_and_std": lambda: functional.mean_and_std(sums),
        "running_returns": lambda: functional.running_returns(x, flags, flags, 0.99, x[0].double()),
        "standardize": lambda: functional.standardize(x, sums[0], sums[1]),
        "value_loss": lambda: functional.value_loss(x, x, x, 0.2),
    }


def test_every_tensor_function_is_called_here() -> None:
    tensor_functions = {
        name
        for name in functional.__all__
        if inspect.isfunction(member := getattr(functional, name))
        and next(iter(inspect.signature(member).parameters.values())).annotation is Tensor
    }
    assert tensor_functions == calls("cpu").keys()


@pytest.mark.parametrize("name", calls("cpu"))
def test_stays_on_the_device_of_its_inputs_without_reading_them(name: str) -> None:
    # A meta tensor has no data: reading it on the host, or mixing it with one of the CPU's, raises.
    result = calls("meta")[name]()
    assert all(tensor.is_meta for tensor in (result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("name", calls("cpu"))
def test_compiles_to_one_graph(name: str) -> None:
    call = calls("cpu")[name]
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(), call())
