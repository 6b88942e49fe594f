import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puffer_lightning.functional import SCHEDULES, WARM_UP_START, constant, cosine, linear, warm_up


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant, [1.0, 1.0, 1.0, 1.0]),
        (linear, [1.0, 0.75, 0.5, 0.0]),
        # ½ (1 + cos 0), ½ (1 + cos 45°), ½ (1 + cos 90°), ½ (1 + cos 180°)
        (cosine, [1.0, 0.8535534, 0.5, 0.0]),
    ],
)
def test_by_hand(schedule: Callable[[float], float], expected: list[float]) -> None:
    assert [schedule(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected, abs=1e-7)


def test_every_schedule_has_its_name() -> None:
    assert {"constant": constant, "linear": linear, "cosine": cosine} == SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
@given(progress=st.lists(st.floats(0.0, 2.0), min_size=2, max_size=2))
def test_never_rises_nor_leaves_the_unit_interval(name: str, progress: list[float]) -> None:
    early, late = (SCHEDULES[name](p) for p in sorted(progress))
    assert 0.0 <= late <= early <= 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_overshooting_run_keeps_the_multiplier_of_the_end(name: str) -> None:
    assert SCHEDULES[name](1.3) == SCHEDULES[name](1.0)


def test_warm_up_by_hand() -> None:
    # 0.1 + 0.9 · progress / 0.2
    assert [warm_up(p, 0.2) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.1, 0.55, 1.0, 1.0, 1.0])


@given(share=st.floats(0.01, 1.0))
def test_warm_up_climbs_from_its_start_to_one_without_a_jump(share: float) -> None:
    climb = [warm_up(share * step / 100, share) for step in range(101)]
    assert climb[0] == WARM_UP_START > 0.0
    assert climb[-1] == pytest.approx(1.0)
    assert all(0.0 < b - a < 0.01 for a, b in itertools.pairwise(climb))


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_no_warm_up(progress: float) -> None:
    assert warm_up(progress, 0.0) == 1.0
