import pytest
import torch

from puffer_lightning.distributed import (
    broadcast,
    gather,
    gather_rows,
    global_sum,
    local_world_size,
    rank,
    world_size,
)
from tests.distributed.processes import run_ranks


def test_a_lone_process_is_rank_0_of_1_and_its_own_sum() -> None:
    x = torch.tensor([1.0, 2.0])
    assert rank() == 0
    assert world_size() == 1
    assert global_sum(x) is x
    assert x.tolist() == [1.0, 2.0]
    assert broadcast("mine") == "mine"
    assert gather("mine") == ["mine"]
    assert gather_rows(x).tolist() == [[1.0, 2.0]]


def test_a_launcher_says_how_many_ranks_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_world_size() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_world_size() == 4


def facts(process: int) -> tuple[int, int, int, bool, list[float]]:
    x = torch.tensor([1.0, 10.0], dtype=torch.float64) * (process + 1)
    return rank(), world_size(), local_world_size(), global_sum(x) is x, x.tolist()


@pytest.fixture(scope="module")
def of_two_ranks() -> list[tuple[int, int, int, bool, list[float]]]:
    return run_ranks(facts)


def test_processes_know_their_rank_and_share_their_sums(
    of_two_ranks: list[tuple[int, int, int, bool, list[float]]],
) -> None:
    assert of_two_ranks == [(0, 2, 2, True, [3.0, 30.0]), (1, 2, 2, True, [3.0, 30.0])]


def exchanged(process: int) -> tuple[str, list[str]]:
    return broadcast(f"of {process}"), gather(f"of {process}")


def test_processes_exchange_objects() -> None:
    assert run_ranks(exchanged) == [("of 0", ["of 0", "of 1"])] * 2


def gathered(process: int) -> list[list[float]]:
    return gather_rows(torch.tensor([float(process), 7.0])).tolist()  # type: ignore[no-any-return]


def test_rows_are_gathered_in_the_order_of_ranks() -> None:
    assert run_ranks(gathered) == [[[0.0, 7.0], [1.0, 7.0]]] * 2
