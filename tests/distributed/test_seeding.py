import pytest
import torch

from puffer_lightning.distributed import derive_seed, share_seed
from tests.distributed.processes import run_ranks


def test_the_same_run_gets_the_same_seeds() -> None:
    assert derive_seed(7, "actions", 1) == derive_seed(7, "actions", 1)
    assert derive_seed(0, "actions") == 1547811076, "saved runs rely on it"


def test_seeds_differ_by_run_purpose_and_rank() -> None:
    seeds = {
        derive_seed(seed, purpose, rank)
        for seed in range(20)
        for purpose in ("actions", "minibatches", "environments", "policy")
        for rank in range(20)
    }
    assert len(seeds) == 20 * 4 * 20


def test_neighbouring_runs_share_no_rank() -> None:
    """Adding the rank to the seed would make rank 1 of run 0 rank 0 of run 1."""
    assert derive_seed(0, "actions", 1) != derive_seed(1, "actions", 0)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**64])
def test_seeds_fit_every_generator(seed: int) -> None:
    assert 0 <= derive_seed(seed, "actions", 3) < 2**31


def seeded_apart(rank: int) -> tuple[int, float]:
    torch.manual_seed(10 + rank)
    share_seed()
    return torch.initial_seed(), torch.rand(1).item()


def test_ranks_seeded_apart_go_on_from_rank_0s_seed() -> None:
    one, other = run_ranks(seeded_apart)
    assert one == other
    assert one[0] == 10


def seeded_alike(rank: int) -> float:
    torch.manual_seed(7)
    torch.rand(rank)
    share_seed()
    return torch.rand(1).item()


def test_sharing_leaves_generators_alone_where_the_seeds_are_the_same() -> None:
    one, other = run_ranks(seeded_alike)
    assert one != other
