"""Collecting rollouts: all environments at once, in halves, and first ready first, in one run.

    python benchmarks/collecting.py --repeats 5

Whole rollouts, [T, N] steps of an MLP policy that acts on the CPU, of three kinds of environments:

1. each step computes for 1 ms,
2. half of the environments for 1 ms a step, half for 10 ms,
3. each step for 1 ms, but one in ten, at random, for 10 ms.

In a rollout every environment makes T steps, so it takes as long as the slowest worker needs for its own.
Where the same ones are always slow, as in 2., nothing can be gained but the policy's time. The modes take
turns, one rollout each: environment steps per second are the median over repeats, ratios the median of
those of one turn. Only ratios mean anything on a busy machine.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from stepping import Busy

from puffer_lightning.envs import SharedMemoryVectorEnv
from puffer_lightning.policies import MLPPolicy
from puffer_lightning.rollout import Collector, Overlap, OverlappedCollector

MODES: dict[str, Overlap | None] = {"all at once": None, "halves": "halves", "first ready": "first_ready"}


class Uneven(Busy):
    """Computes for 1 ms a step, and now and then for 10 ms."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def step(self, action: Any) -> Any:
        """Compute."""
        self.milliseconds = 10.0 if self.np_random.random() < 0.1 else 1.0
        return super().step(action)


def measure(title: str, envs: Sequence[Any], options: argparse.Namespace) -> None:
    num_envs, collectors = len(envs), {}
    for name, overlap in MODES.items():
        env = SharedMemoryVectorEnv(
            envs, num_workers=options.workers, batch_size=num_envs // 2 if overlap else None
        )
        collectors[name] = (
            OverlappedCollector(env, options.horizon, overlap=overlap)
            if overlap
            else Collector(env, options.horizon)
        )
    sizes = (options.width, options.width)
    policy = MLPPolicy(Busy.observation_space, Busy.action_space, hidden_sizes=sizes)
    rates: dict[str, list[float]] = {name: [] for name in MODES}
    for repeat in range(options.repeats + 1):
        for name, collector in collectors.items():
            rollout = collector.collect(policy)
            if repeat:  # The first warms up.
                rates[name].append(rollout.num_steps / rollout.seconds)
    for collector in collectors.values():
        collector.env.close()
    print(f"\n{title}; {num_envs} environments, {options.workers} workers, MLP {sizes}")
    together = rates["all at once"]
    for name, values in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(values, together, strict=True))
        print(f"  {name:12} {statistics.median(values):10,.0f} steps/s   this / all at once {ratio:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="rollouts of each mode")
    parser.add_argument("--horizon", type=int, default=64, help="T")
    parser.add_argument("--num_envs", type=int, default=16, help="N, a multiple of twice the workers")
    parser.add_argument("--workers", type=int, default=2, help="an even number")
    parser.add_argument("--width", type=int, default=256, help="of the policy's hidden layers")
    options = parser.parse_args()
    half = options.num_envs // 2
    fast, slow = partial(Busy, 1.0), partial(Busy, 10.0)
    measure("1 ms a step", [fast] * 2 * half, options)
    measure("1 ms and 10 ms a step, side by side", [fast, slow] * half, options)
    measure("1 ms a step and 10 ms at random", [Uneven] * 2 * half, options)


if __name__ == "__main__":
    main()
