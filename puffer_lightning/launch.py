"""Starts the ranks of a run as processes, watches over them, and ends them all when one fails.

Lightning's own launcher makes the first process rank 0 and lets it watch the others. A rank that hangs is
left behind when rank 0 has given up, and each rank prints what it saw of another's failure. Here, as with
torchrun, the process that watches does not train.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from puffer_lightning.distributed import (
    explanation,
    is_first_failure,
    let_others_notice,
    lost_connection,
    rank,
    seconds_waited,
    silent_ranks,
    world_size,
)

# Of the process that launched a rank, in the rank's environment.
_LAUNCHER = "PUFFER_LIGHTNING_LAUNCHER"
_POLL_SECONDS = 0.1
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
END_SECONDS = 5.0
"""Between asking a rank to end and ending it."""


def launch(
    command: Sequence[str], num_ranks: int, environment: Mapping[str, str], first_rank: int = 0
) -> int:
    """Run a command as several ranks of this machine until all have ended.

    Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks, which then have as long as they need to end; a
    second Ctrl-C ends them. If a rank fails, the others are asked to end and ended five seconds later; if it
    was killed, one sentence says so, as it could not.

    Args:
        command: What each rank runs; it finds its number in ``LOCAL_RANK``.
        num_ranks: Ranks on this machine.
        environment: Of each rank, on top of this process's.
        first_rank: The number of ``LOCAL_RANK`` 0 among the ranks of all machines.

    Returns:
        The exit code: 0, that of the first rank that failed, or 1 if it was killed; 128 plus the number of
        the signal that was passed on if they ended by that.
    """
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **environment,
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "RANK": str(first_rank + local_rank),
                _LAUNCHER: str(os.getpid()),
            },
            # Else Ctrl-C would reach the ranks twice: from the terminal, and from here.
            start_new_session=True,
        )
        for local_rank in range(num_ranks)
    ]
    signals: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in signals
        signals.append(number)
        for process in ranks:
            process.send_signal(signal.SIGKILL if again else number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        failed = _first_to_fail(ranks, signals)
        if failed is None:
            return 0
        code = ranks[failed].returncode
        if code < 0 and signals:
            return 128 + signals[0]
        if code < 0:
            name = signal.Signals(-code).name
            print(f"error: rank {first_rank + failed} was killed by {name}.", file=sys.stderr)
        return code if code > 0 else 1
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)


def launched_here() -> bool:
    """Whether :func:`launch` started this process."""
    return _LAUNCHER in os.environ


def end_with_launcher() -> None:
    """Let this process, if it is a launched rank, end when its launcher is gone, however it went."""
    if launched_here():
        threading.Thread(target=_outlive, args=(int(os.environ[_LAUNCHER]),), daemon=True).start()
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_outlive, args=(os.getppid(),), daemon=True).start()


def is_rank() -> bool:
    """Whether this process is one of several ranks, whoever launched it."""
    return world_size() > 1 or "LOCAL_RANK" in os.environ


def end_rank(failure: Exception, sentence: str | None = None) -> NoReturn:
    """End one of several ranks, with what is to be said of its failure: the cause alone, and by one rank.

    A rank that failed because another one did, or that may be the only one to have noticed, holds its tongue
    until its launcher has ended it, and speaks if nobody does. At once and without clean-up, which could wait
    for ranks that are gone.

    Args:
        failure: What ended the training.
        sentence: What there is to say if the user can fix it.
    """
    number, code, patient = int(os.environ.get("RANK", rank())), 1, False
    if sentence := sentence or explanation(failure):
        # Without a process group the ranks cannot tell whether they all fail.
        code, message, patient = 2, f"error: {sentence}", world_size() == 1 and number > 0
    elif not lost_connection(failure):
        message = f"Rank {number} failed.\n" + "".join(traceback.format_exception(failure)).rstrip()
    else:
        silent, seconds = silent_ranks(), seconds_waited(failure)
        if seconds is None:
            patient = True
            message = f"error: rank {number} lost its connection to another one, which failed or was killed."
        elif silent:
            message = (
                f"error: rank {', '.join(map(str, silent))} did not answer within {seconds:g} seconds, the "
                "timeout of trainer.strategy: it hangs, or needs more time than that."
            )
        else:
            message = f"error: the ranks waited {seconds:g} seconds for one another: not all did the same."
    if patient:
        time.sleep(2 * END_SECONDS)
    if is_first_failure():
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    let_others_notice()
    os._exit(code)


def exit_code(end: SystemExit | KeyboardInterrupt) -> int:
    """The exit code of what ends a process; 130 for Ctrl-C, of which Lightning makes a 1."""
    if isinstance(end, KeyboardInterrupt) or isinstance(end.__context__, KeyboardInterrupt):
        return 130
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    # Not sys.exit, for which a hanging rank would have to return first.
    os._exit(1)


def _first_to_fail(ranks: Sequence[subprocess.Popen[Any]], signals: Sequence[int]) -> int | None:
    """Wait for a rank to fail; None if all have ended well. Of several the one that did not end by itself.

    Those that end by a signal that was passed on to all have not failed before all have ended.
    """
    while True:
        codes = [process.poll() for process in ranks]
        told = {code for number in signals for code in (-number, 128 + number)}
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and (None not in codes or any(codes[rank] not in told for rank in failed)):
            return min(failed, key=lambda rank: codes[rank] or 0)
        if None not in codes:
            return None
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    for process in ranks:
        process.terminate()
    end = time.monotonic() + END_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
