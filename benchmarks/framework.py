"""What Lightning costs: the command line's Trainer against a bare loop over the same functions, in one run.

    python benchmarks/framework.py --config ppo.yaml --repeats 5

Both sides train the same configuration from the same seed to the same weights, in turn, on one thread: the
Trainer with its logger, progress display and checkpoints but without evaluations, the bare loop with nothing
but the collector and the update. Prints environment steps per second of each, and the median ratio of the
times.
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time

import torch
from torch import Tensor

from puffer_lightning.cli import PufferCLI


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


def _run(side: type[_Fit], args: list[str]) -> tuple[float, int, list[Tensor]]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli = side(["fit", *args])
    return cli.seconds, cli.model.env_steps, list(cli.model.policy.state_dict().values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        args = ["--config", options.config, "--trainer.limit_val_batches", "0", *overrides]
        rows = []
        _run(_Bare, args)
        for repeat in range(options.repeats):
            order = (_Fit, _Bare) if repeat % 2 else (_Bare, _Fit)
            measured = {side: _run(side, args) for side in order}
            (trainer, steps, weights), (bare, _, bare_weights) = measured[_Fit], measured[_Bare]
            assert all(map(torch.equal, weights, bare_weights)), "the two sides did different work"
            rows.append((trainer, bare))
            print(
                f"Trainer {steps / trainer:9,.0f} SPS   bare loop {steps / bare:9,.0f} SPS   "
                f"ratio of times {trainer / bare:.3f}",
                flush=True,
            )
    ratio = statistics.median(trainer / bare for trainer, bare in rows)
    print(f"median ratio {ratio:.3f}: Lightning's share of the wall time is {1 - 1 / ratio:.1%}")


if __name__ == "__main__":
    main()
