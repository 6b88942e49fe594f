"""What Lightning costs: the command line's Trainer against a bare loop over the same functions, in one run.

    python benchmarks/framework.py --config ppo.yaml --repeats 5

Both sides train the same configuration from the same seed to the same weights, in turn, on one thread: the
Trainer with its logger, progress display and checkpoints but without evaluations, the bare loop with nothing
but the collector and the update. Prints environment steps per second of each and the ratio of the times,
which on a shared machine is mostly noise, and the share of its time that the Trainer spends outside of the
collector and the learner, which is not.
"""

import argparse
import contextlib
import functools
import io
import os
import statistics
import tempfile
import time

import torch
from torch import Tensor

from puffer_lightning.cli import PufferCLI
from puffer_lightning.ppo import Learner
from puffer_lightning.rollout import Collector

_inside = 0.0


def _time(owner: type, name: str) -> None:
    """Add up the seconds spent in a method in ``_inside``."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def timed(*args: object, **kwargs: object) -> object:
        global _inside
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            _inside += time.perf_counter() - begin

    setattr(owner, name, timed)


class _Fit(PufferCLI):
    """``fit`` without the evaluation after it, or nothing at all but the objects."""

    seconds = 0.0

    def fit(self, **kwargs: object) -> None:
        begin = time.perf_counter()
        self.trainer.fit(**kwargs)  # type: ignore[arg-type]
        self.seconds = time.perf_counter() - begin

    def after_fit(self) -> None:
        pass


class _Bare(_Fit):
    def fit(self, **kwargs: object) -> None:
        begin = time.perf_counter()
        model, data = self.model, self.datamodule
        model.build(data)
        optimizer, scheduler = model.make_optimizer(data)
        learner = model.start()
        while learner.env_steps < data.total_timesteps:
            learner.learn(data.collect(model.policy, learner.act), optimizer)
            scheduler.step()
        data.close()
        self.seconds = time.perf_counter() - begin


def _run(side: type[_Fit], args: list[str]) -> tuple[float, float, int, list[Tensor]]:
    global _inside
    _inside = 0.0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli = side(["fit", *args])
    return (
        cli.seconds,
        1 - _inside / cli.seconds,
        cli.model.env_steps,
        list(cli.model.policy.state_dict().values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    _time(Collector, "collect")
    _time(Learner, "learn")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        args = ["--config", options.config, "--trainer.limit_val_batches", "0", *overrides]
        rows = []
        _run(_Bare, args)
        for repeat in range(options.repeats):
            order = (_Fit, _Bare) if repeat % 2 else (_Bare, _Fit)
            measured = {side: _run(side, args) for side in order}
            trainer, outside, steps, weights = measured[_Fit]
            bare, bare_outside, _, bare_weights = measured[_Bare]
            assert all(map(torch.equal, weights, bare_weights)), "the two sides did different work"
            rows.append((trainer / bare, outside - bare_outside))
            print(
                f"Trainer {steps / trainer:9,.0f} SPS   bare loop {steps / bare:9,.0f} SPS   "
                f"ratio of times {trainer / bare:.3f}   outside {outside:.1%} (bare {bare_outside:.1%})",
                flush=True,
            )
    ratio, share = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"median ratio of times {ratio:.3f}; median share of the wall time that is Lightning's {share:.1%}")


if __name__ == "__main__":
    main()
