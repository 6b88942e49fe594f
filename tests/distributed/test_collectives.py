import pytest
import torch

from puffer_lightning.distributed import global_sum, rank, world_size
from tests.distributed.processes import run_ranks


def test_a_lone_process_is_rank_0_of_1_and_its_own_sum() -> None:
    x = torch.tensor([1.0, 2.0])
    assert rank() == 0
    assert world_size() == 1
    assert global_sum(x) is x
    assert x.tolist() == [1.0, 2.0]


def facts(process: int) -> tuple[int, int, bool, list[float]]:
    x = torch.tensor([1.0, 10.0], dtype=torch.float64) * (process + 1)
    return rank(), world_size(), global_sum(x) is x, x.tolist()


@pytest.fixture(scope="module")
def of_two_ranks() -> list[tuple[int, int, bool, list[float]]]:
    return run_ranks(facts)


def test_processes_know_their_rank_and_share_their_sums(
    of_two_ranks: list[tuple[int, int, bool, list[float]]],
) -> None:
    assert of_two_ranks == [(0, 2, True, [3.0, 30.0]), (1, 2, True, [3.0, 30.0])]
