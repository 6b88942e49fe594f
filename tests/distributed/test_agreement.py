import re
from typing import Any

import pytest
import torch

from puffer_lightning.distributed import check_same_options, check_same_tensors
from puffer_lightning.errors import ConfigurationError
from tests.distributed.processes import run_ranks


def complaint(rank: int, options: list[dict[str, Any]]) -> str:
    try:
        check_same_options(options[rank])
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ranks_with_the_same_options_agree() -> None:
    options = {"data": {"env": "CartPole-v1", "num_envs": 8}, "model": {"target_kl": None}}
    assert run_ranks(complaint, [options, options]) == ["", ""]


def test_all_options_that_differ_are_named_with_both_values_on_both_ranks() -> None:
    one: dict[str, Any] = {"data": {"num_envs": 8, "horizon": 16, "kwargs": {"size": 3}}, "seed": 1}
    other: dict[str, Any] = {"data": {"num_envs": 9, "horizon": 16, "kwargs": {}}, "seed": 2}
    said, also = run_ranks(complaint, [one, other])
    assert said == also
    assert "data.num_envs is 8 on rank 0 and 9 on rank 1" in said
    assert "seed is 1 on rank 0 and 2 on rank 1" in said
    assert "data.kwargs.size is 3 on rank 0 and not given on rank 1" in said
    assert "horizon" not in said


def test_a_lone_process_agrees_with_itself() -> None:
    check_same_options({"seed": 1})
    check_same_tensors({"weight": torch.ones(2)})


def drift(rank: int, case: str) -> str:
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"weight": weight, "half": weight.bfloat16(), "count": torch.tensor(3), "mask": weight > 2}
    if rank == 1 and case == "last bit":
        tensors["weight"] = torch.nextafter(weight, torch.tensor(9.0))
    elif rank == 1 and case == "order":
        tensors["half"] = tensors["half"].flip(0)
    elif rank == 1 and case == "scalar and mask":
        tensors |= {"count": torch.tensor(4), "mask": weight > 3}
    elif case == "NaN":
        tensors["weight"] = weight / 0.0
    try:
        check_same_tensors(tensors)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("none", None),
        ("NaN", None),
        ("last bit", "weight"),
        ("order", "half"),
        ("scalar and mask", "count, mask"),
    ],
)
def test_drift_is_found_to_the_last_bit_and_named_on_all_ranks(case: str, named: str | None) -> None:
    for said in run_ranks(drift, case):
        found = re.search(r"apart: (.+) not the same", said)
        assert (found and found[1]) == named
