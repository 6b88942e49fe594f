"""How trainer and worker tell each other that there is something to do.

Each counts, in a word of shared memory that the other watches for a while, what it told or has done. Only who
has seen nothing for that long sleeps, on a pipe, and only who sleeps is sent a byte: no system call a step
while both are busy, no processor time while one is not.
"""

import select
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from puffer_lightning.sharing import fence, give_way, words

STEP, MESSAGE = 0, 1

# How long the trainer sleeps before it looks for itself, whatever it was told; a worker, ten times as long.
NAP_SECONDS = 0.1


class Command(IntEnum):
    """Words of the cache line that the trainer writes."""

    COUNT = 0
    KIND = 1
    TRAINER_SLEEPS = 2


class Reply(IntEnum):
    """Words of the cache line that the worker writes."""

    COUNT = 0
    KIND = 1
    WORKER_SLEEPS = 2
    CURRENT_ROW = 3


class Watch:
    """Watches for something before one sleeps, as long as that has been worth it lately.

    A watch in vain costs its time twice where the other side needs the processor, so after one there is none
    but every 32nd time, until that sees something.

    Args:
        seconds: The longest watch.
    """

    def __init__(self, seconds: float) -> None:
        self._longest = self._seconds = seconds
        self._times = 0

    def __call__(self, ready: Callable[[], bool]) -> bool:
        """Whether it became ready."""
        if ready():
            return True
        self._times += 1
        seconds = self._seconds if self._times % 32 else self._longest
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            # The other side may need this processor, and then need not be woken.
            give_way()
            if ready():
                self._seconds = self._longest
                return True
        self._seconds = 0.0
        return False


def read_message(connection: Connection) -> bytes:
    """The next message that is not merely a wake-up call."""
    while not (message := connection.recv_bytes()):
        pass
    return message


class TrainerEnd:
    """The trainer's end of its line to one worker.

    Args:
        connection: To the worker.
        command: [8] int64, see :class:`Command`.
        reply: [8] int64, see :class:`Reply`.
    """

    def __init__(self, connection: Connection, command: NDArray[np.int64], reply: NDArray[np.int64]) -> None:
        self.connection = connection
        self.command, self.reply = words(command), words(reply)

    @property
    def done(self) -> bool:
        """Whether the worker has done all that it was told."""
        return self.reply[Reply.COUNT] == self.command[Command.COUNT]

    def tell(self, message: bytes | None = None) -> None:
        """Tell the worker to step, or send it a message.

        That it is gone shows when it is waited for.
        """
        command = self.command
        command[Command.KIND] = STEP if message is None else MESSAGE
        fence()
        command[Command.COUNT] += 1
        fence()
        if message is not None or self.reply[Reply.WORKER_SLEEPS]:
            with suppress(OSError):
                self.connection.send_bytes(message or b"")

    def say_asleep(self, asleep: bool) -> None:
        """Say whether the trainer sleeps and is to be woken."""
        self.command[Command.TRAINER_SLEEPS] = asleep

    def drain(self) -> bool:
        """Take a stale wake-up call out of the pipe, which is not empty; False if the worker is gone."""
        try:
            # An answer comes after the count, so until the worker is done there can be nothing else.
            if not self.done:
                self.connection.recv_bytes()
        except (EOFError, OSError):
            return False
        return True

    def answer(self) -> bytes | None:
        """What the worker sent along with what is now ``done``.

        Raises:
            EOFError: The worker is gone.
            OSError: Likewise.
        """
        fence()
        return read_message(self.connection) if self.reply[Reply.KIND] == MESSAGE else None


class WorkerEnd:
    """The worker's end.

    Args:
        connection: To the trainer.
        command: [8] int64, see :class:`Command`.
        reply: [8] int64, see :class:`Reply`.
        watch_seconds: The longest to watch for a command before sleeping.
    """

    def __init__(
        self,
        connection: Connection,
        command: NDArray[np.int64],
        reply: NDArray[np.int64],
        watch_seconds: float,
    ) -> None:
        self._connection = connection
        self._command, self._reply = words(command), words(reply)
        self._watch = Watch(watch_seconds)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def set_current_row(self, row: int) -> None:
        """Say which environment is about to be stepped, for the trainer to know should this be the end."""
        self._reply[Reply.CURRENT_ROW] = row

    def wait(self) -> bytes | None:
        """Wait for a command: a message, or ``None`` for a step.

        Raises:
            EOFError: The trainer is gone.
        """
        if not self._watch(self._told):
            self._sleep()
        fence()
        return read_message(self._connection) if self._command[Command.KIND] == MESSAGE else None

    def _told(self) -> bool:
        return self._command[Command.COUNT] != self._reply[Reply.COUNT]

    def _sleep(self) -> None:
        self._reply[Reply.WORKER_SLEEPS] = 1
        fence()
        while not self._told():
            # A message comes after the count, so what is there before it is a stale wake-up call.
            if self._poll.poll(10_000 * NAP_SECONDS) and not self._told():
                self._connection.recv_bytes()
        self._reply[Reply.WORKER_SLEEPS] = 0

    def done(self, message: bytes | None = None) -> None:
        """Say that the command was carried out, and send what there is to say about it."""
        reply = self._reply
        reply[Reply.KIND] = STEP if message is None else MESSAGE
        fence()
        reply[Reply.COUNT] = self._command[Command.COUNT]
        fence()
        if message is not None or self._command[Command.TRAINER_SLEEPS]:
            self._connection.send_bytes(message or b"")
