import math
from typing import Any

import pytest
import torch
from torch import Tensor

from puffer_lightning.distributed import global_sum
from puffer_lightning.rollout import EpisodeStatistics, deal_statistics, episode_means
from tests.distributed.processes import run_ranks


def episodes(*values: float) -> tuple[Tensor, Tensor]:
    """Episodes of these returns, each ten times as long."""
    returns = torch.tensor(values, dtype=torch.float64)
    return returns, returns * 10


def read(statistics: EpisodeStatistics) -> dict[str, float]:
    return {name: value.item() for name, value in episode_means(global_sum(statistics.sums())).items()}


def test_nothing_is_known_before_the_first_episode() -> None:
    statistics = EpisodeStatistics()
    statistics.update(*episodes())
    known = read(statistics)
    assert math.isnan(known["episode_return"])
    assert math.isnan(known["episode_length"])
    assert known["episodes"] == 0


def test_means_are_over_episodes_and_not_over_rollouts() -> None:
    statistics = EpisodeStatistics()
    statistics.update(*episodes(1.0))
    statistics.update(*episodes(2.0, 3.0, 6.0))
    assert read(statistics) == {"episode_return": 3.0, "episode_length": 30.0, "episodes": 4}
    assert (1.0 + 11.0 / 3.0) / 2 != 3.0, "the mean of the rollouts' means"


def test_only_the_last_episodes_count() -> None:
    statistics = EpisodeStatistics(window=2)
    statistics.update(*episodes(100.0, 1.0))
    statistics.update(*episodes(2.0))
    assert read(statistics) == {"episode_return": 1.5, "episode_length": 15.0, "episodes": 3}
    statistics.update(*episodes(100.0, 100.0, 4.0, 6.0))
    assert read(statistics) == {"episode_return": 5.0, "episode_length": 50.0, "episodes": 7}


def test_a_rollout_without_an_ended_episode_changes_nothing() -> None:
    statistics = EpisodeStatistics(window=2)
    statistics.update(*episodes(1.0, 2.0))
    before = read(statistics)
    statistics.update(*episodes())
    assert read(statistics) == before


def test_saved_and_loaded_it_goes_on() -> None:
    one, other = EpisodeStatistics(window=3), EpisodeStatistics(window=3)
    one.update(*episodes(1.0, 2.0, 3.0))
    other.load_state_dict(one.state_dict())
    for statistics in (one, other):
        statistics.update(*episodes(7.0))
    assert read(one) == read(other) == {"episode_return": 4.0, "episode_length": 40.0, "episodes": 4}


def on_each_rank(rank: int) -> list[dict[str, Any]]:
    statistics = EpisodeStatistics(window=3)
    seen = []
    # Three episodes on the one rank, one on the other; then none on the one.
    for returns in ([(1.0, 2.0, 3.0), (10.0,)][rank], [(), (14.0,)][rank]):
        statistics.update(*episodes(*returns))
        seen.append(read(statistics))
    return seen


@pytest.fixture(scope="module")
def of_two_ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(on_each_rank)


def test_ranks_agree_on_the_mean_of_all_their_episodes(of_two_ranks: list[list[dict[str, Any]]]) -> None:
    one, other = of_two_ranks
    assert one == other
    assert one[0] == {"episode_return": 4.0, "episode_length": 40.0, "episodes": 4}
    assert (2.0 + 10.0) / 2 != 4.0, "the mean of the ranks' means"


def test_each_rank_keeps_its_own_episodes(of_two_ranks: list[list[dict[str, Any]]]) -> None:
    assert of_two_ranks[0][1] == {"episode_return": 6.0, "episode_length": 60.0, "episodes": 5}


def left_by(*returns: float, types: tuple[str, ...] = ("",)) -> dict[str, dict[str, Tensor]]:
    statistics = EpisodeStatistics(window=4)
    statistics.update(*episodes(*returns))
    return {name: dict(statistics.state_dict()) for name in types}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dealt_out_to_other_ranks_no_episode_is_lost_and_the_newest_are_kept(ranks: int) -> None:
    left = [left_by(1.0, 2.0, 3.0), left_by(4.0, 5.0, 6.0, 7.0, 8.0, 9.0)]
    kept: list[float] = []
    counted = 0
    for rank in range(ranks):
        share = EpisodeStatistics(window=4)
        share.load_state_dict(deal_statistics(left, rank, ranks)[""])
        known = share.recent[:, ~share.recent[0].isnan()]
        assert torch.equal(known[1], known[0] * 10)
        kept += known[0].tolist()
        counted += int(share.episodes)
        share.update(*episodes(10.0))
        assert share.recent[0, -1] == 10.0
    assert counted == 9
    # Of one rank as many as its window takes, the last of each rank first.
    assert sorted(kept) == ([2.0, 3.0, 8.0, 9.0] if ranks == 1 else [1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0])


def test_types_of_agents_are_dealt_out_apart() -> None:
    left = [left_by(1.0, types=("", "fox")), left_by(2.0, types=("", "hare"))]
    dealt = deal_statistics(left, 0, 1)
    assert {name: int(of["episodes"]) for name, of in dealt.items()} == {"": 2, "fox": 1, "hare": 1}
