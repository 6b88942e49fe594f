import pytest

from puffer_lightning.functional import straggler_metrics


def test_names_the_rank_that_the_others_wait_for() -> None:
    assert straggler_metrics([[1.0, 9.0], [4.0, 6.0], [2.0, 8.0], [3.0, 7.0]]) == {
        "slowest": 1.0,
        "slowdown": 2.0,  # 4 over the median of 1, 2 and 3
        "waiting_share": pytest.approx(0.15),  # 3, 0, 2 and 1 of 10 seconds
    }


def test_of_two_ranks_the_one_is_measured_by_the_other() -> None:
    assert straggler_metrics([[2.0, 3.0], [1.0, 4.0]]) == {
        "slowest": 0.0,
        "slowdown": 2.0,
        "waiting_share": pytest.approx(0.1),
    }


def test_equal_ranks_wait_for_nobody() -> None:
    assert straggler_metrics([[3.0, 1.0]] * 3) == {"slowest": 0.0, "slowdown": 1.0, "waiting_share": 0.0}
