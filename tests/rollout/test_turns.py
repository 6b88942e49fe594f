from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from puffer_lightning.rollout.turns import Turns

sizes = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))


@given(sizes, st.randoms(use_true_random=False), st.floats(0.0, 1.0))
def test_every_environment_makes_its_steps_in_full_batches_whoever_is_ready(
    sizes: tuple[int, int, int], random: Random, patience: float
) -> None:
    """Any B of those that step may be done first; some are always late, and some never wait long."""
    horizon, batches, batch_size = sizes
    num_envs = batches * batch_size
    turns = Turns(horizon, num_envs, batch_size)
    made = np.zeros(num_envs, dtype=int)
    stepping: list[int] = []
    while not turns.over:
        env_ids = turns.take()
        if env_ids is not None:
            assert len(set(env_ids.tolist())) == batch_size
            assert not set(env_ids.tolist()) & set(stepping)
            stepping += env_ids.tolist()
            continue
        assert len(stepping) >= batch_size, "there is somebody to wait for"
        stepping.sort(key=lambda env_id: env_id + num_envs * (random.random() < patience))
        done, stepping = stepping[:batch_size], stepping[batch_size:]
        made[done] += 1
        turns.done(np.array(done))
    assert made.tolist() == [horizon] * num_envs
    assert not stepping


def test_who_is_fast_may_run_ahead_as_far_as_full_batches_remain() -> None:
    """With 3 fast environments and a slow one, the last third of the fast ones' steps is made beside it."""
    turns, made = Turns(6, 4, 2), [0, 0, 0, 0]
    stepping: list[int] = []
    while not turns.over:
        env_ids = turns.take()
        if env_ids is not None:
            stepping += env_ids.tolist()
            continue
        # Environment 3 is received only when it cannot be avoided.
        stepping.sort()
        done, stepping = stepping[:2], stepping[2:]
        if 3 in done:
            break
        for env_id in done:
            made[env_id] += 1
        turns.done(np.array(done))
    assert sum(made) == 12
    assert made[3] == 0


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_who_is_equally_fast_takes_turns(batches: int) -> None:
    turns, order = Turns(3, 2 * batches, 2), []
    stepping: list[list[int]] = []
    while not turns.over:
        env_ids = turns.take()
        if env_ids is None:
            turns.done(np.array(stepping.pop(0)))
        else:
            stepping.append(env_ids.tolist())
            order.append(env_ids.tolist())
    assert order == [[2 * batch, 2 * batch + 1] for batch in range(batches)] * 3


def makespan(seconds: NDArray[np.float64], batch_size: int, in_order: bool) -> float:
    """How long a rollout takes whose steps take ``seconds`` [T, N], and acting on a batch half of one."""
    horizon, num_envs = seconds.shape
    turns, made, clock = Turns(horizon, num_envs, batch_size), np.zeros(num_envs, dtype=int), 0.0
    stepping: dict[int, float] = {}
    while not turns.over:
        env_ids = turns.take()
        if env_ids is not None:
            clock += 0.5
            stepping |= {row: clock + seconds[made[row], row] for row in env_ids.tolist()}
            continue
        order = list(stepping) if in_order else sorted(stepping, key=lambda row: stepping[row])
        done = order[:batch_size]
        clock = max(clock, *(stepping.pop(row) for row in done))
        made[done] += 1
        turns.done(np.array(done))
    return clock


def test_who_is_ready_first_acts_first_and_so_slow_steps_cost_less() -> None:
    """One step in ten takes ten times as long, at random; every environment has a worker of its own."""
    seconds = np.where(np.random.default_rng(0).random((64, 16)) < 0.1, 10.0, 1.0)
    together, halves, first_half, first_quarter = (
        makespan(seconds, batch_size, in_order)
        for batch_size, in_order in ((16, True), (8, True), (8, False), (4, False))
    )
    assert seconds.sum(axis=0).max() < first_quarter < 0.7 * first_half
    assert first_half < 0.95 * halves < 0.95 * together


def test_nobody_is_held_back_for_long_by_who_is_always_slow() -> None:
    """Of an environment whose steps all take ten times as long, the rollout takes hardly longer."""
    seconds = np.ones((64, 16))
    seconds[:, 3] = 10.0
    assert makespan(seconds, 8, in_order=False) < 1.1 * seconds[:, 3].sum()
