from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
