import time

import torch

from puffer_lightning.distributed import Preemption, global_sum
from tests.distributed.processes import run_ranks


def barrier() -> None:
    global_sum(torch.zeros(1))


def polls(rank: int, share: float) -> list[bool]:
    """What rank 1 sees before and after rank 0 has finished, in two rollouts, and in a later run."""
    seen = []
    for _ in range(2):
        preemption = Preemption(share)
        for _ in range(2):
            preemption.begin()
            barrier()
            seen.append(preemption.due())
            barrier()
            if rank == 0:
                preemption.finish()
            barrier()
            seen.append(preemption.due())
            barrier()
    return seen


def test_a_rank_is_due_once_enough_others_have_finished_this_very_rollout() -> None:
    assert run_ranks(polls, 0.5) == [[False, True] * 4] * 2


def test_the_share_is_rounded_up() -> None:
    assert run_ranks(polls, 0.6) == [[False, False] * 4] * 2


def slow_to_finish(rank: int) -> bool:
    preemption = Preemption(0.5)
    preemption.begin()
    if rank == 0:
        time.sleep(0.3)
        preemption.finish()
        return True
    begun = time.monotonic()
    while not preemption.due():
        assert time.monotonic() - begun < 60
    return True


def test_polls_wait_for_nobody_and_see_the_count_at_last() -> None:
    assert run_ranks(slow_to_finish) == [True, True]
