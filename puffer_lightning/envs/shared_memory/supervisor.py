"""Starts the workers, waits for them, and does what is to be done about those that die or hang."""

import os
import pickle
import select
import time
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from gymnasium.vector.utils import clear_mpi_env_vars

from puffer_lightning.envs.shared_memory.faults import EnvironmentFaultError, Fault, WorkerError
from puffer_lightning.envs.shared_memory.layout import SharedBatch
from puffer_lightning.envs.shared_memory.signals import NAP_SECONDS, Command, Reply, TrainerEnd, Watch
from puffer_lightning.envs.shared_memory.worker import Job, Request, work
from puffer_lightning.sharing import fence

# Importing a simulator in many processes at once, on a slow disk, may take minutes.
_START_SECONDS = 300.0
# How long a worker that was asked to end may take to close its environments.
_CLOSE_SECONDS = 5.0


class Worker:
    """One worker process, as seen by the trainer.

    Args:
        job: What it does.
        context: How processes are started.
        batch: The shared arrays.
    """

    def __init__(self, job: Job, context: BaseContext, batch: SharedBatch) -> None:
        self.job = job
        self.context = context
        self.line: TrainerEnd
        self.process: BaseProcess
        self.deadline = 0.0
        self._started = False
        self._lines = batch.commands[job.worker], batch.replies[job.worker]

    def start(self, job: Job) -> None:
        """Start a process; it is ``done`` when its environments are made."""
        command, reply = self._lines
        command[:], reply[:] = 0, 0
        command[Command.COUNT] = 1
        ours, theirs = self.context.Pipe()
        # Not all kinds of context have the same class of processes.
        process: BaseProcess = self.context.Process(  # type: ignore[attr-defined]
            target=work, args=(job, theirs), name=f"environments-{job.worker}", daemon=True
        )
        self.line, self.process = TrainerEnd(ours, command, reply), process
        self.deadline = time.monotonic() + _START_SECONDS
        with clear_mpi_env_vars():
            process.start()
        self._started = True
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._started and self.process.is_alive()

    @property
    def idle(self) -> bool:
        """Whether it waits to be told something."""
        return self.alive and self.line.done

    def tell(self, request: Request | None, timeout: float) -> None:
        """Have it step, or carry out a request."""
        self.deadline = time.monotonic() + timeout
        self.line.tell(None if request is None else pickle.dumps(request))

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self._started:
            self._started = False
            self.process.kill()
            self.process.join()
            self.process.close()
            self.line.connection.close()


class Supervisor:
    """The workers, each of which is told something, waited for, and asked for its answer.

    Args:
        jobs: One a worker.
        context: How processes are started.
        batch: The shared arrays.
        step_timeout: Seconds that a worker may take for a step of its environments.
        watch_seconds: The longest to watch the workers before sleeping.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        context: BaseContext,
        batch: SharedBatch,
        step_timeout: float,
        watch_seconds: float,
    ) -> None:
        self.workers = [Worker(job, context, batch) for job in jobs]
        self._owner = os.getpid()
        self._step_timeout = step_timeout
        self._watch = Watch(watch_seconds)

    def start(self) -> None:
        """Start all workers and wait until their environments are made.

        Raises:
            EnvironmentFaultError: Some cannot be made; the message says why.
        """
        for worker in self.workers:
            worker.start(worker.job)
        everyone = range(len(self.workers))
        self.wait(everyone, len(everyone))
        for index in everyone:
            answer = self.answer(index)
            if isinstance(answer, WorkerError):
                raise EnvironmentFaultError(Fault(answer.row, None, answer.reason, answer.details))

    def restart(self, index: int, seeds: Sequence[int]) -> Any:
        """Put a new process in the place of a lost one; its environments begin new episodes.

        Returns:
            As :meth:`answer`.
        """
        worker = self.workers[index]
        worker.kill()
        worker.start(worker.job.restarted(seeds))
        self.wait([index], 1)
        return self.answer(index)

    def tell(self, index: int, request: Request | None = None) -> None:
        """Have a worker step its environments, or carry out a request."""
        self.workers[index].tell(request, self._step_timeout)

    def wait(self, waiting: Sequence[int], count: int) -> list[int]:
        """Wait until workers are done, lost or late.

        Args:
            waiting: Which ones, all of which were told something.
            count: How many of them are waited for.

        Returns:
            The ``count`` or more of them about which :meth:`answer` has something to say.
        """
        workers = [self.workers[index] for index in waiting]
        lines = [worker.line for worker in workers]

        def enough() -> bool:
            return sum(line.done for line in lines) >= count

        overdue: set[int] = set()
        if not self._watch(enough):
            overdue = self._sleep(dict(zip(waiting, workers, strict=True)), count)
        return [index for index, line in zip(waiting, lines, strict=True) if line.done or index in overdue]

    def _sleep(self, workers: dict[int, Worker], count: int) -> set[int]:
        poll, descriptors = select.poll(), {}
        overdue: set[int] = set()
        for index, worker in workers.items():
            descriptors[worker.line.connection.fileno()] = index
            poll.register(worker.line.connection, select.POLLIN)
        try:
            while True:
                busy = [
                    worker for index, worker in workers.items() if not (worker.line.done or index in overdue)
                ]
                missing = count - len(workers) + len(busy)
                if missing <= 0:
                    return overdue
                # Only as many are to wake the trainer as it cannot do without: of all, one at a time.
                wakers = busy[: len(busy) - missing + 1]
                for worker in wakers:
                    worker.line.say_asleep(True)
                fence()
                if any(worker.line.done for worker in wakers):
                    continue
                events = poll.poll(1000 * NAP_SECONDS)
                for descriptor, _ in events:
                    index = descriptors[descriptor]
                    line = workers[index].line
                    if not line.drain():
                        overdue.add(index)
                    if line.done or index in overdue:
                        poll.unregister(descriptor)
                now = time.monotonic()
                overdue |= {index for index, worker in workers.items() if now > worker.deadline}
                if not events:
                    # A process that was killed may have left its end of the pipe to children of its own.
                    overdue |= {index for index, worker in workers.items() if not worker.alive}
        finally:
            for worker in workers.values():
                worker.line.say_asleep(False)

    def answer(self, index: int) -> Any:
        """What a worker that ``wait`` returned has to say: its answer, or a WorkerError."""
        worker = self.workers[index]
        if worker.line.done:
            try:
                message = worker.line.answer()
                return None if message is None else pickle.loads(message)
            except (EOFError, OSError):
                pass
        rows, row = worker.job.rows, worker.line.reply[Reply.CURRENT_ROW]
        whose = f"the process of environments {rows.start} to {rows.stop - 1}"
        if worker.alive and time.monotonic() > worker.deadline:
            return WorkerError(row, f"it hangs: {whose} did not answer in time (step_timeout)")
        worker.process.join(_CLOSE_SECONDS)
        return WorkerError(row, f"{whose} died with exit code {worker.process.exitcode}")

    def stop(self) -> None:
        """End all processes: those that are idle may close their environments first."""
        if os.getpid() != self._owner:
            return  # In a process that was forked from the trainer, and has a copy of its objects.
        try:
            idle = [worker for worker in self.workers if worker.idle]
            for worker in idle:
                worker.line.tell(pickle.dumps(("close", ())))
            end = time.monotonic() + _CLOSE_SECONDS
            for worker in idle:
                worker.process.join(max(0.0, end - time.monotonic()))
        finally:
            # Also after Ctrl-C: one that is left would go on to write where other environments will be.
            for worker in self.workers:
                worker.kill()
