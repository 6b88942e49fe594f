"""``StopOnSignal``: a run that is told to end saves first, on all ranks together."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from puffer_lightning.callbacks.protocols import ppo_parts
from puffer_lightning.distributed import gather, rank

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Handler = Callable[[int, FrameType | None], Any]


class StopOnSignal(Callback):
    """Ends training after the iteration that is under way when Ctrl-C, SIGTERM or SIGUSR1 comes.

    As training ends otherwise, too: ``Checkpoint`` writes ``last.ckpt``, and what follows in the program is
    not run. The exit code is 128 plus the signal's number, as shells have it: 130, 143 or 138. If any rank
    has received the signal, all ranks end after the same iteration, which they agree on in a collective that
    an iteration has anyway. A second Ctrl-C ends the process at once.

    So the grace that a scheduler gives has to be longer than an iteration, the evaluation that may follow it
    and the writing of a checkpoint. Outside of training a signal ends the process where it is.

    On SLURM Lightning requeues a job on SIGUSR1, or whatever ``SLURMEnvironment`` was told, from within the
    signal handler, where ranks that wait for one another would do so for ever. That is done after the
    iteration, too, and training goes on until SLURM ends it.

    Raises:
        ConfigurationError: The module is not ``PPO``.
    """

    def __init__(self) -> None:
        self._heard: list[int] = []
        self._listening = False
        self._ending: int = 0
        self._requeue: dict[int, Handler] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module, _ = ppo_parts(trainer, self)
        self._heard, self._listening, self._ending = [], False, 0

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before: Lightning has set up its own handlers only now, and there is a learner.
        if not self._listening and threading.current_thread() is threading.main_thread():
            self._listening = True
            self._requeue = _requeue(trainer)
            for number in (*_SIGNALS, *self._requeue):
                if number == signal.SIGTERM or number in self._requeue or _is_default(number):
                    # Lightning puts back what there was before, when it tears down the Trainer.
                    signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._heard:
            os._exit(128 + number)
        self._heard.append(number)
        self._module.learner.stop_signal = self._heard[0]
        if rank() == 0:
            # Not print, which may be in use.
            what = "requeueing" if number in self._requeue else "ending"
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{_name(number)}: {what} after this iteration{again}.\n".encode())

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        learner = self._module.learner
        agreed = learner.agreed_signal
        if agreed in self._requeue:
            self._requeue[agreed](agreed, None)
            self._heard = [number for number in self._heard if number != agreed]
            learner.stop_signal = next(iter(self._heard), 0)
        elif agreed:
            trainer.should_stop = True
            # Not even what the user asked for at least.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One that came after the last iteration counts, too.
        self._ending = max(gather(next(iter(self._heard), 0)))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ending:
            last = getattr(trainer.checkpoint_callback, "last_model_path", "")
            resume = f"; to go on from here, resume with ckpt_path {last}" if last else ""
            rank_zero_info(
                f"Ended by {_name(self._ending)} after {self._module.env_steps:,} environment steps{resume}"
            )
            raise SystemExit(128 + self._ending)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._end_at_once()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_at_once()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_at_once()

    def _end_at_once(self) -> None:
        """Let SIGTERM unwind the process; Lightning's handler would wait for other ranks, and exit with 0."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _requeue(trainer: Trainer) -> dict[int, Handler]:
    """Lightning's answer to the signal on which it requeues a job, if it does."""
    environment = trainer._accelerator_connector.cluster_environment
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return {}
    assert environment.requeue_signal is not None
    answer = signal.getsignal(environment.requeue_signal)
    return {environment.requeue_signal: answer} if callable(answer) else {}


def _is_default(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, None)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
