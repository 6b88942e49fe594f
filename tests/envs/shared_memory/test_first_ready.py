from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import error
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.envs.shared_memory.conftest import Make
from tests.envs.shared_memory.environments import Counting, Random


def slow_last(num_envs: int = 4) -> list[partial[Counting]]:
    return [partial(Counting, number, nap=0.2 * (number >= num_envs - 2)) for number in range(num_envs)]


def test_fast_environments_do_not_wait_for_slow_ones(make: Make) -> None:
    env = make(slow_last(), num_workers=2, batch_size=2)
    env.reset(seed=5)
    env.send(np.zeros(4, int))
    for step in range(1, 5):
        received = env.recv()
        assert received.env_ids.tolist() == [0, 1]
        assert received.observations.tolist() == [[0, 5, step, 0], [1, 6, step, 0]]
        assert received.rewards.tolist() == [step, step]
        env.send(np.zeros(2, int), received.env_ids)
    received = env.recv([2, 3])
    assert received.env_ids.tolist() == [2, 3]
    assert received.observations.tolist() == [[2, 7, 1, 0], [3, 8, 1, 0]]


def test_who_waits_longest_is_received_first(make: Make) -> None:
    env = make([partial(Counting, number) for number in range(3)], num_workers=3, batch_size=1)
    env.reset()
    env.send(np.zeros(3, int))
    order = []
    for _ in range(6):
        env._supervisor.wait(env._pending, len(env._pending))
        received = env.recv()
        order.append(int(received.env_ids[0]))
        env.send(np.zeros(1, int), received.env_ids)
    assert order == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize(("num_workers", "batch_size"), [(6, 1), (6, 4), (3, 2), (3, 4), (2, 6)])
def test_each_environment_equals_its_serial_twin(
    mode: AutoresetMode, num_workers: int, batch_size: int, make: Make
) -> None:
    steps, num_envs = 25, 6
    env = make(Random, num_envs, num_workers, batch_size=batch_size, autoreset_mode=mode, copy=True)
    serial = [SyncVectorEnv([Random], autoreset_mode=mode) for _ in range(num_envs)]
    actions = np.random.default_rng(3).integers(-1, 2, (steps + 1, num_envs))
    first, _ = env.reset(seed=9)
    assert first.tolist() == [each.reset(seed=9 + row)[0][0].tolist() for row, each in enumerate(serial)]
    env.send(actions[0])
    taken = np.zeros(num_envs, dtype=int)
    while (taken < steps).all():
        received = env.recv()
        assert len(received.env_ids) == batch_size
        for place, row in enumerate(received.env_ids):
            observations, rewards, terminated, truncated, infos = serial[row].step(actions[taken[row]][[row]])
            assert received.observations[place].tolist() == observations[0].tolist()
            assert received.rewards[place] == rewards[0]
            assert received.terminated[place] == terminated[0]
            assert received.truncated[place] == truncated[0]
            for key in ("final_obs", "draw", "text"):
                assert_same_info(received.infos, place, infos, key)
        taken[received.env_ids] += 1
        env.send(actions[taken[received.env_ids], received.env_ids], received.env_ids)
    assert (taken > 0).all()


def assert_same_info(ours: dict[str, Any], place: int, theirs: dict[str, Any], key: str) -> None:
    given = bool(theirs.get(f"_{key}", [False])[0])
    assert bool(ours.get(f"_{key}", np.zeros(99))[place]) == given
    if given:
        np.testing.assert_array_equal(ours[key][place], theirs[key][0])


def test_halves_can_alternate(make: Make) -> None:
    env = make([partial(Counting, number) for number in range(4)], num_workers=4, batch_size=2)
    env.reset()
    halves = np.array([[0, 1], [2, 3]])
    env.send(np.zeros(4, int))
    for step in range(1, 5):
        for half in halves:
            received = env.recv(half)
            assert received.observations[:, 0].tolist() == half.tolist()
            assert received.observations[:, 2].tolist() == [step, step]
            env.send(np.zeros(2, int), half)


def test_rows_follow_the_order_of_the_ids(make: Make) -> None:
    env = make(Random, 4, 2)
    env.reset()
    env.send(np.array([1, 0]), [2, 3])
    env.send(np.array([0, 1]), [0, 1])
    assert env._batch.actions.tolist() == [0, 1, 1, 0]
    env.recv()
    env.send(np.array([1, 0, -1, 1]), [2, 3, 0, 1])
    assert env._batch.actions.tolist() == [-1, 1, 1, 0]


def test_misuse_is_refused(make: Make) -> None:
    env = make(Random, 4, 2)
    env.reset()
    with pytest.raises(error.NoAsyncCallError, match="send"):
        env.recv()
    with pytest.raises(error.NoAsyncCallError, match="send"):
        env.recv([0, 1])
    env.send(np.zeros(2, int), [0, 1])
    with pytest.raises(error.NoAsyncCallError, match="send"):
        env.recv()
    with pytest.raises(error.AlreadyPendingCallError, match="receive"):
        env.send(np.zeros(2, int), [0, 1])
    with pytest.raises(error.AlreadyPendingCallError, match="receive"):
        env.step(np.zeros(4, int))
    with pytest.raises(error.AlreadyPendingCallError, match="receive"):
        env.call("shout", "a")
    for ids in ([0], [1, 0], [0, 1, 2], [0, 1, 0, 1], [4, 5], []):
        with pytest.raises(ValueError, match="env_ids"):
            env.send(np.zeros(len(ids), int), ids)
    env.reset()
    env.step(np.zeros(4, int))


def test_a_refused_action_is_not_sent(make: Make) -> None:
    env = make(Random, 4, 2)
    env.reset()
    with pytest.raises(ValueError, match="actions"):
        env.send(np.zeros(3, int))
    env.step(np.zeros(4, int))


def test_a_reset_of_some_leaves_alone_what_the_others_were_sent(make: Make) -> None:
    env = make([partial(Counting, number) for number in range(4)], num_workers=2, batch_size=2)
    env.reset(seed=5)
    env.send(np.zeros(4, int))
    env.recv([0, 1])
    mask = np.array([True, False, False, False])
    observations, _ = env.reset(options={"reset_mask": mask})
    assert observations[:2].tolist() == [[0, 5, 0, 1], [1, 6, 1, 0]]
    assert env.recv().observations.tolist() == [[2, 7, 1, 0], [3, 8, 1, 0]]
    env.send(np.zeros(2, int), [0, 1])
    env.reset(options={"reset_mask": mask})
    with pytest.raises(error.NoAsyncCallError):
        env.recv()
