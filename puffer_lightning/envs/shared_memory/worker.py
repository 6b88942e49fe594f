"""The process in which some of the environments are."""

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection as connections
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import CloudpickleWrapper

from puffer_lightning.envs.shared_memory.faults import WorkerError
from puffer_lightning.envs.shared_memory.layout import SharedBatch
from puffer_lightning.envs.shared_memory.signals import WorkerEnd
from puffer_lightning.envs.shared_memory.stepping import Slice

Request = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Job:
    """What a worker is to do; picklable.

    Attributes:
        worker: Its index.
        rows: Which of the N environments it has.
        env_fns: What makes them.
        memory: See ``SharedBatch``.
        observation_space: Of one environment.
        action_space: Of one environment.
        num_envs: N.
        num_workers: W.
        autoreset_mode: What to do when an episode ends.
        mask_non_finite: Mask what is not finite rather than raise.
        watch_seconds: The longest to watch for a command before sleeping.
        restarts: Seeds, where the environments stand in for those of a worker that was lost.
    """

    worker: int
    rows: range
    env_fns: Sequence[CloudpickleWrapper[Any]]
    memory: Any
    observation_space: Space[Any]
    action_space: Space[Any]
    num_envs: int
    num_workers: int
    autoreset_mode: AutoresetMode
    mask_non_finite: bool
    watch_seconds: float
    restarts: Sequence[int] | None = None

    def restarted(self, seeds: Sequence[int]) -> "Job":
        """The same for environments that stand in for lost ones."""
        return replace(self, restarts=seeds)


def work(job: Job, connection: Connection) -> None:
    """Step environments until told to stop, or until the trainer is gone.

    Args:
        job: What to do.
        connection: To the trainer.
    """
    # Ctrl-C reaches the whole process group, and SIGUSR1 may reach the whole job; the trainer decides what
    # becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=_die_with_trainer, daemon=True).start()
    batch = SharedBatch(job.memory, job.observation_space, job.action_space, job.num_envs, job.num_workers)
    line = WorkerEnd(connection, batch.commands[job.worker], batch.replies[job.worker], job.watch_seconds)
    envs: list[gym.Env[Any, Any]] = []
    try:
        _make(job, envs, line)
        part = Slice(
            envs,
            job.rows.start,
            batch,
            gym.vector.utils.batch_space(job.action_space, len(envs)),
            job.autoreset_mode,
            mask_non_finite=job.mask_non_finite,
            on_row=line.set_current_row,
            restarts=job.restarts,
        )
        line.done(pickle.dumps(part.restart() if job.restarts is not None else None))
        _serve(part, line)
    except WorkerError as error:
        line.done(pickle.dumps(error))
    except (EOFError, OSError):
        pass  # The trainer is gone.
    finally:
        for env in envs:
            env.close()


def _make(job: Job, envs: list[gym.Env[Any, Any]], line: WorkerEnd) -> None:
    for row, env_fn in zip(job.rows, job.env_fns, strict=True):
        line.set_current_row(row)
        try:
            envs.append(env_fn())
        except Exception as error:
            raise WorkerError(row, f"{type(error).__name__}: {error}", traceback.format_exc()) from error
        for what in ("observation_space", "action_space"):
            expected, found = getattr(job, what), getattr(envs[-1], what)
            if found != expected:
                raise WorkerError(
                    row, f"its {what} is {found} where that of environment 0 is {expected}", fatal=True
                )


def _serve(part: Slice, line: WorkerEnd) -> None:
    while True:
        message = line.wait()
        if message is None:
            outcome = part.step()
            line.done(None if outcome is None else _pack(outcome, part))
            continue
        name, arguments = pickle.loads(message)
        if name == "close":
            return
        line.done(_pack(_answer(part, name, arguments), part))


def _answer(part: Slice, name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "reset":
        return part.reset(*arguments)
    if name == "get_states":
        return part.get_states()
    if name == "set_states":
        return part.set_states(arguments[-1])
    action: Callable[..., Any] = {"call": _call, "set": _set}[name]
    results = []
    for row, env, argument in zip(part.rows, part.envs, arguments[-1], strict=True):
        try:
            results.append(action(env, *arguments[:-1], argument))
        except Exception as error:
            # Handed over as a result: the environments are as good as before.
            return WorkerError(row, f"{type(error).__name__}: {error}", traceback.format_exc())
    return results


def _call(env: gym.Env[Any, Any], name: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    attribute = env.get_wrapper_attr(name)
    return attribute(*arguments[0], **arguments[1]) if callable(attribute) else attribute


def _set(env: gym.Env[Any, Any], name: str, value: Any) -> None:
    env.set_wrapper_attr(name, value)


def _pack(answer: Any, part: Slice) -> bytes:
    try:
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        rows = f"environments {part.rows.start} to {part.rows.stop - 1}"
        raise WorkerError(
            part.rows.start, f"what {rows} return cannot be pickled: {error}", fatal=True
        ) from error


def _die_with_trainer() -> None:
    # Even if an environment hangs, and whoever else holds the other end of the pipe.
    trainer = parent_process()
    assert trainer is not None
    connections.wait([trainer.sentinel])
    os._exit(1)
