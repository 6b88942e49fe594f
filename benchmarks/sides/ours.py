"""``puffer_lightning``, as its command line trains: Trainer, logger, progress display and checkpoints."""

import contextlib
import copy
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from puffer_lightning.cli import PufferCLI
from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.ppo import PPOConfig
from sides.clock import Clock, SolveClock
from sides.work import Work


class _Fit(PufferCLI):
    """``fit`` with a callback that measures, and without the evaluation after it."""

    callback: Callback

    def before_fit(self) -> None:
        super().before_fit()
        self.trainer.callbacks.append(self.callback)

    def after_fit(self) -> None:
        pass


class _WithBareLoop(_Fit):
    """The same functions in a loop beside it, an iteration after each of the Trainer's."""

    def before_fit(self) -> None:
        super().before_fit()
        self.callback.bare = BareLoop(*copy.deepcopy((self.model, self.datamodule)))  # type: ignore[attr-defined]


class BareLoop:
    """What the Trainer drives, without it.

    Args:
        model: Not attached to a Trainer.
        data: Likewise.
    """

    def __init__(self, model: PPO, data: RolloutDataModule) -> None:
        self.model, self._data = model, data
        model.build(data)
        self._optimizer, self._scheduler = model.make_optimizer(data)
        self._learner = model.start()

    def iterate(self) -> dict[str, float]:
        """An iteration; returns its metrics."""
        rollout = self._data.collect(self.model.policy, self._learner.act)
        metrics = self._learner.learn(rollout, self._optimizer)
        self._scheduler.step()
        return metrics

    def close(self) -> None:
        """Close the environments."""
        self._data.close()


class _Ticks(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock, self.inside, self.mean_return = clock, 0.0, math.nan

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.tick()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if self.clock.timing:
            self.inside += sum(pl_module.learner.rank_seconds[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.tick()
        if (mean_return := trainer.callback_metrics.get("rollout/episode_return")) is not None:
            self.mean_return = mean_return.item()


class _Alternates(_Ticks):
    """Times the Trainer's iterations, and those of a bare loop in between."""

    bare: BareLoop

    def __init__(self, clock: Clock, clock_of_bare: Clock) -> None:
        super().__init__(clock)
        self.clock_of_bare = clock_of_bare

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock.begun:
            self.clock.pause()
            self._iterate_bare()
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._iterate_bare()
        self.clock_of_bare.tick()
        self.bare.close()

    def _iterate_bare(self) -> None:
        self.clock_of_bare.tick()
        self.metrics = self.bare.iterate()
        self.clock_of_bare.pause()


class _Solves(Callback):
    def __init__(self) -> None:
        self.clock = SolveClock()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        of = trainer.callback_metrics
        finished = trainer.current_epoch + 1 == trainer.max_epochs
        steps = self.clock.limit if finished else pl_module.env_steps
        episodes = int(of["rollout/episodes"])
        trainer.should_stop |= self.clock.over(steps, episodes, lambda: of["rollout/episode_return"].item())


def config(work: Work, iterations: int) -> dict[str, Any]:
    """The work in words of the command line."""
    name, options = {
        "separate": ("MLPPolicy", {"hidden_sizes": work.hidden_sizes, "activation": work.activation}),
        "shared": (
            "MLPPolicy",
            {"hidden_sizes": work.hidden_sizes, "activation": work.activation, "shared": True},
        ),
        "nature": ("CNNPolicy", {"hidden_size": work.hidden_sizes[0]}),
        "lstm": ("LSTMPolicy", {"encoder_size": work.hidden_sizes[0], "hidden_size": work.hidden_sizes[0]}),
    }[work.network]
    data = {
        "env": work.env,
        "num_envs": work.num_envs,
        "horizon": work.horizon,
        "total_timesteps": iterations * work.steps,
    }
    model = {
        "policy": {"class_path": f"puffer_lightning.policies.{name}", "init_args": options},
        "optimizer": {
            "class_path": "torch.optim.Adam",
            "init_args": {"lr": work.learning_rate, "eps": 1e-5, "fused": True},
        },
        "lr_schedule": "constant",
    }
    model |= {name: value for name, value in vars(work).items() if name in PPOConfig.__dataclass_fields__}
    # Environments in torch go where the policy goes; all else is measured on the CPU.
    on_gpu = work.env.startswith("puffer/Torch") and torch.cuda.is_available()
    trainer: dict[str, Any] = {"limit_val_batches": 0, "accelerator": "gpu" if on_gpu else "cpu"}
    if on_gpu:
        data["env_kwargs"] = {"device": "cuda"}
    sections = {"data": data, "model": model, "trainer": trainer}
    return {name: section | work.options.get(name, {}) for name, section in sections.items()}


def run(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train as the work says."""
    clock = Clock(work, threads)
    return _result(_train(config(work, clock.total), seed, _Ticks(clock)).callback)


def run_with_bare_loop(work: Work, seed: int, threads: int | None) -> dict[str, dict[str, Any]]:
    """Train as the work says and, iteration by iteration in turn, the same without the Trainer.

    Raises:
        SystemExit: The two did not come to the same weights, bit for bit.
    """
    clock, clock_of_bare = Clock(work, threads), Clock(work, threads)
    callback = _Alternates(clock, clock_of_bare)
    cli = _train(config(work, clock.total), seed, callback, _WithBareLoop)
    check_same_weights(cli.model.policy, callback.bare.model.policy)
    bare = clock_of_bare.result(callback.metrics.get("rollout/episode_return", math.nan))
    return {"puffer_lightning": _result(callback), "bare loop": bare}


def check_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Refuse to compare what did different work.

    Raises:
        SystemExit: They differ, be it in a bit.
    """
    of_other = other.state_dict()
    if any(not torch.equal(weights, of_other[name]) for name, weights in one.state_dict().items()):
        raise SystemExit("Trainer and bare loop did different work: their weights differ")


def _result(callback: _Ticks) -> dict[str, float | None]:
    outside = 1 - callback.inside / callback.clock.seconds
    return callback.clock.result(callback.mean_return) | {"outside": outside}


def run_eager(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train the same without ``compile``."""
    model = {**work.options["model"], "compile": False}
    return run(replace(work, options={**work.options, "model": model}), seed, threads)


def profile(work: Work, seed: int, threads: int | None) -> dict[str, float]:
    """Milliseconds of each phase of an iteration."""
    clock = Clock(work, threads)
    options = config(work, clock.total)
    options["trainer"]["profiler"] = {"class_path": "puffer_lightning.PhaseProfiler"}
    milliseconds: dict[str, float] = _train(options, seed, _Ticks(clock)).trainer.profiler.milliseconds()
    return milliseconds


def solve(seed: int) -> dict[str, float | None]:
    """Train the default task until it is solved."""
    args = ["--config", "ppo.yaml", "--trainer.limit_val_batches", "0", "--seed_everything", str(seed)]
    return _silently(_Fit, _Solves(), args).callback.clock.outcome  # type: ignore[no-any-return]


def _train(options: dict[str, Any], seed: int, callback: Callback, side: type[_Fit] = _Fit) -> Any:
    """Train as the options say; returns the command line's object."""
    Path("work.yaml").write_text(json.dumps(options))
    return _silently(side, callback, ["--config", "work.yaml", "--seed_everything", str(seed)])


def _silently(side: type[_Fit], callback: Callback, args: list[str]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return type("CLI", (side,), {"callback": callback})(["fit", *args])
