import multiprocessing

import numpy as np
import pytest

from puffer_lightning.envs.shared_memory.signals import Command, Reply, TrainerEnd, Watch, WorkerEnd


class Asked:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> bool:
        self.times += 1
        return False


def test_a_watch_in_vain_is_not_repeated_at_once_but_in_the_end() -> None:
    watch = Watch(0.01)
    assert watch(lambda: True)
    asked = [Asked() for _ in range(32)]
    assert not any(watch(each) for each in asked)
    assert asked[0].times > 1
    assert [each.times for each in asked[1:-1]] == [1] * 30
    assert asked[-1].times > 1
    answers = iter([False] * 32 + [True])
    for _ in range(31):
        assert not watch(lambda: next(answers))
    assert watch(lambda: next(answers))
    again = Asked()
    assert not watch(again)
    assert again.times > 1


@pytest.fixture
def ends() -> tuple[TrainerEnd, WorkerEnd]:
    command, reply = np.zeros(8, np.int64), np.zeros(8, np.int64)
    here, there = multiprocessing.Pipe()
    return TrainerEnd(here, command, reply), WorkerEnd(there, command, reply, 0.0)


def test_who_is_awake_costs_no_system_call(ends: tuple[TrainerEnd, WorkerEnd]) -> None:
    trainer, worker = ends
    assert trainer.done
    for _ in range(3):
        trainer.tell()
        assert not trainer.done
        assert worker.wait() is None
        worker.done()
        assert trainer.done
        assert trainer.answer() is None
    assert not trainer.connection.poll()
    assert not worker._connection.poll()


def test_who_sleeps_is_woken(ends: tuple[TrainerEnd, WorkerEnd]) -> None:
    trainer, worker = ends
    trainer.reply[Reply.WORKER_SLEEPS] = 1
    trainer.tell()
    assert worker._connection.poll()
    assert worker.wait() is None
    trainer.reply[Reply.WORKER_SLEEPS] = 0
    trainer.say_asleep(True)
    worker.done()
    assert trainer.connection.poll()
    assert trainer.command[Command.TRAINER_SLEEPS] == 1


def test_stale_wake_up_calls_are_no_messages(ends: tuple[TrainerEnd, WorkerEnd]) -> None:
    trainer, worker = ends
    trainer.connection.send_bytes(b"")
    worker._connection.send_bytes(b"")
    trainer.tell(b"question")
    assert worker.wait() == b"question"
    worker.done(b"answer")
    assert trainer.answer() == b"answer"
    trainer.connection.send_bytes(b"")
    trainer.tell()
    assert worker.wait() is None
