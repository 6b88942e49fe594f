"""CartPole in torch against gymnasium's vectorised CartPole: stepping, and training end to end, in one run.

    OMP_NUM_THREADS=1 python benchmarks/device_stepping.py --num_envs 4096 --repeats 9

All sides take turns on one thread. The table gives the median of environment steps per second, and the median
of the ratios to gymnasium within a turn. Stepping is with actions that are there already; training is with
the same policy (two MLPs of 64-64), horizon 32 and coefficients, one pass over each rollout. The work differs
in one thing: gymnasium computes CartPole in float64, ours is in float32.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from puffer_lightning.envs import make_vector_env
from puffer_lightning.policies import make_policy
from puffer_lightning.ppo import Learner, PPOConfig
from puffer_lightning.rollout import Collector

HORIZON = 32
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "gymnasium": ("CartPole-v1", {}),
    "torch": ("puffer/TorchCartPole-v0", {}),
    "torch, compiled": ("puffer/TorchCartPole-v0", {"compile": True}),
}


def _stepping(env_id: str, kwargs: dict[str, Any], num_envs: int) -> Callable[[], None]:
    env = make_vector_env(env_id, num_envs, kwargs)
    observations, _ = env.reset(seed=0)
    actions = torch.randint(2, (num_envs,), generator=torch.Generator().manual_seed(0))
    given: Any = actions if isinstance(observations, torch.Tensor) else actions.numpy()

    def turn() -> None:
        for _ in range(HORIZON):
            env.step(given)

    return turn


def _training(env_id: str, kwargs: dict[str, Any], num_envs: int) -> Callable[[], None]:
    env = make_vector_env(env_id, num_envs, kwargs)
    torch.manual_seed(0)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    collector, learner = Collector(env, HORIZON), Learner(policy, PPOConfig(update_epochs=1), seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, fused=True)

    def turn() -> None:
        learner.learn(collector.collect(policy), optimizer)

    return turn


def _seconds(turn: Callable[[], None], turns: int) -> float:
    begin = time.perf_counter()
    for _ in range(turns):
        turn()
    return (time.perf_counter() - begin) / turns


def _measure(
    make: Callable[[str, dict[str, Any], int], Callable[[], None]], num_envs: int, repeats: int, turns: int
) -> list[tuple[str, float, float]]:
    """Name, steps per second and ratio to gymnasium of each side, medians over the repeats."""
    sides = {name: make(*source, num_envs) for name, source in SIDES.items()}
    for turn in sides.values():
        _seconds(turn, 3)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # Each side goes first in turn.
        for name in [*sides][repeat % len(sides) :] + [*sides][: repeat % len(sides)]:
            seconds[name].append(_seconds(sides[name], turns))
    return [
        (
            name,
            HORIZON * num_envs / statistics.median(times),
            statistics.median(
                theirs / ours for theirs, ours in zip(seconds["gymnasium"], times, strict=True)
            ),
        )
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_envs", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{options.num_envs} environments, {os.cpu_count()}-core {platform.machine()} CPU, one thread, "
        f"torch {torch.__version__}, medians of {options.repeats} interleaved repeats\n"
    )
    print("| what | CartPole | SPS | ratio to gymnasium |\n|---|---|---|---|")
    for what, make, turns in (("stepping", _stepping, 10), ("training", _training, 1)):
        for name, sps, ratio in _measure(make, options.num_envs, options.repeats, turns):
            print(f"| {what} | {name} | {sps:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
