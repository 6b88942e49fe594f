from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.distributed import no_sync
from puffer_lightning.errors import ConfigurationError
from tests.distributed.processes import run_ranks

MICROBATCHES = ([1.0], [10.0], [100.0])


def gradients(module: nn.Module, weight: Tensor, rank: int) -> list[float]:
    """The gradient of a weight after each of three microbatches, of which the last is reduced."""
    seen = []
    for number, microbatch in enumerate(MICROBATCHES, start=1):
        x = torch.tensor([microbatch]) * (rank + 1)
        if number < len(MICROBATCHES):
            with no_sync(module):
                torch.autograd.backward(module(x).sum())
        else:
            torch.autograd.backward(module(x).sum())
        seen.append(torch.nan if weight.grad is None else local(weight.grad).sum().item())
    return seen


def local(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def layer() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def sharded() -> nn.Module:
    module = layer()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def fail_within(module: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), no_sync(module):
        raise RuntimeError("on purpose")


def on_each_rank(rank: int) -> dict[str, Any]:
    parallel = DistributedDataParallel(layer())
    found: dict[str, Any] = {"ddp": gradients(parallel, parallel.module.weight, rank)}
    always = DistributedDataParallel(layer())
    for microbatch in MICROBATCHES:
        torch.autograd.backward(always(torch.tensor([microbatch]) * (rank + 1)).sum())
    found["ddp, always"] = always.module.weight.grad.item()

    shards = sharded()
    found["fsdp"] = gradients(shards, shards.weight, rank)  # type: ignore[arg-type]
    broken = sharded()
    fail_within(broken)
    torch.autograd.backward(broken(torch.ones(1, 1) * (rank + 1)).sum())
    found["fsdp, after an error"] = local(broken.weight.grad).sum().item()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="static_graph does not go with accumulate"):
        no_sync(DistributedDataParallel(layer(), static_graph=True)).__enter__()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_each_rank)


def test_ddp_reduces_only_at_the_boundary(of_two_ranks: list[dict[str, Any]]) -> None:
    # The mean over ranks of 111 and 222; before that, each rank's own.
    assert [found["ddp"] for found in of_two_ranks] == [[1.0, 11.0, 166.5], [2.0, 22.0, 166.5]]


def test_the_gradient_is_that_of_reducing_always(of_two_ranks: list[dict[str, Any]]) -> None:
    assert [found["ddp, always"] for found in of_two_ranks] == [166.5, 166.5]


def test_fsdp_reduces_at_the_boundary(of_two_ranks: list[dict[str, Any]]) -> None:
    for found in of_two_ranks:
        assert found["fsdp"][-1] == 166.5


def test_fsdp_reduces_again_after_an_error(of_two_ranks: list[dict[str, Any]]) -> None:
    assert [found["fsdp, after an error"] for found in of_two_ranks] == [1.5, 1.5]


def test_a_plain_module_has_nothing_to_keep_back() -> None:
    module = layer()
    assert gradients(module, module.weight, rank=0) == [1.0, 11.0, 111.0]
