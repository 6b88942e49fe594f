"""``Progress``: one bar for the whole run, in environment steps."""

import os
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm
from typing_extensions import override

from puffer_lightning.callbacks.protocols import ppo_parts
from puffer_lightning.errors import ConfigurationError

_LINE_SECONDS = 5.0
_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"


class Progress(ProgressBar):
    """Shows environment steps of ``total_timesteps``, the time left, SPS and the last mean episode return.

    Takes the place of Lightning's bar, which starts anew at each epoch, here each iteration. On a terminal it
    is a bar that stays when the run ends; elsewhere (a file, a notebook) a plain line every 5 seconds and one
    at the end. Both go to standard error; what is printed through :meth:`print` goes to standard output.
    Between two redraws an iteration costs one look at the clock.

    Args:
        refresh_seconds: Least time between two redraws of the bar.

    Raises:
        ConfigurationError: ``refresh_seconds`` is negative, or the module is not ``PPO``.
    """

    def __init__(self, refresh_seconds: float = 0.1) -> None:
        super().__init__()
        if refresh_seconds < 0:
            raise ConfigurationError(f"refresh_seconds is {refresh_seconds}: set it to 0 or more.")
        self._refresh_seconds = refresh_seconds
        self._enabled = True
        self._display: _Bar | _Lines | None = None
        self._next_refresh = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether this process shows progress."""
        return self._enabled

    @override
    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False
        self._close()

    @override
    def enable(self) -> None:
        """Show progress again, from the next ``fit`` on."""
        self._enabled = True

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print without breaking the bar; takes what the builtin ``print`` takes, save ``flush``."""
        if isinstance(self._display, _Bar):
            self._display.write(sep.join(map(str, args)), **kwargs)
        else:
            print(*args, sep=sep, **kwargs)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        ppo_parts(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        self._module, data = ppo_parts(trainer, self)
        self._total = data.total_timesteps
        # A terminal that does not know its width, as in some containers, has no room for a bar.
        if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:
            self._display, self._seconds = _Bar(self._module.env_steps, self._total), self._refresh_seconds
        else:
            self._display, self._seconds = _Lines(self._module.env_steps), _LINE_SECONDS
        self._next_refresh = time.monotonic() + self._seconds

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._display is None:
            return
        if self._module.env_steps >= self._total:
            # Now rather than when training ends: Lightning says in between why it ends, amid the bar.
            self._finish(trainer)
        elif (now := time.monotonic()) >= self._next_refresh:
            self._next_refresh = now + self._seconds
            self._show(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _show(self, trainer: Trainer) -> None:
        assert self._display is not None
        # Not before it is known that something will be shown: this is the costly part.
        metrics = trainer.callback_metrics
        shown = [f"{metrics['time/sps'].item():,.0f} SPS"] if "time/sps" in metrics else []
        if "rollout/episode_return" in metrics:
            shown.append(f"return {metrics['rollout/episode_return'].item():.4g}")
        steps = self._module.env_steps
        # The last rollout may go beyond the total.
        self._display.show(steps, max(steps, self._total), ", ".join(shown))

    def _finish(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._show(trainer)
            self._close()

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


class _Bar(tqdm):  # type: ignore[type-arg]  # generic in the stubs alone
    """A bar that is redrawn when told to and at no other time."""

    # Without tqdm's thread that watches slow bars: environment workers may yet be forked from this process.
    monitor_interval = 0

    def __init__(self, steps: int, total: int) -> None:
        super().__init__(
            initial=steps,
            total=total,
            unit_scale=True,
            dynamic_ncols=True,
            leave=True,
            file=sys.stderr,
            bar_format=_FORMAT,
        )

    def show(self, steps: int, total: int, metrics: str) -> None:
        self.n, self.total = steps, total
        self.set_postfix_str(metrics)


class _Lines:
    """The same on plain lines."""

    def __init__(self, steps: int) -> None:
        self._initial, self._began = steps, time.monotonic()

    def show(self, steps: int, total: int, metrics: str) -> None:
        elapsed, done = time.monotonic() - self._began, steps - self._initial
        left = elapsed / done * (total - steps) if done else 0.0
        times = f"{tqdm.format_interval(elapsed)} elapsed, {tqdm.format_interval(left)} left"
        parts = [f"{steps:,} of {total:,} steps ({steps / total:.0%})", metrics, times]
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""
