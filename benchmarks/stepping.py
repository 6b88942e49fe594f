"""Stepping environments in worker processes: ours against gymnasium's and Stable-Baselines3's, in one run.

    python benchmarks/stepping.py --repeats 5

Four measurements, each the median over repeats in which all sides take turns:

1. CartPole-v1, 64 environments, random actions, 2 workers where their number can be chosen. A machine that is
   busy with other things is given to whoever has most processes, so processor time is told, too.
2. Environments that compute for 1 ms a step, against what the processors could do at best: as many processes
   that do nothing but compute.
3. Processor time of the workers while the policy, here a sleep of 20 ms, is at work (on Linux).
4. Half of the environments compute for 1 ms a step, half for 10 ms: first-ready against synchronous stepping.

Prints environment steps per second, and ratios to ours; only these mean anything on a busy machine.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from puffer_lightning.envs import SharedMemoryVectorEnv

Rates = dict[str, list[float]]
Step = Callable[[Any], object]

OURS = "SharedMemoryVectorEnv"
WORKERS = 2


class Busy(gym.Env[Any, Any]):
    """Computes for some milliseconds of processor time a step."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds, self.observation = milliseconds, np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start nothing in particular."""
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> Any:
        """Compute."""
        compute(self.milliseconds)
        return self.observation, 0.0, False, False, {}


def compute(milliseconds: float) -> None:
    end = time.process_time() + milliseconds / 1000
    while time.process_time() < end:
        pass


def compute_alone(steps: int, milliseconds: float, barrier: Any) -> None:
    barrier.wait()
    for _ in range(steps):
        compute(milliseconds)
    barrier.wait()


def rate(step: Step, num_envs: int, seconds: float) -> float:
    """Environment steps per second."""
    actions = np.random.default_rng(0).integers(0, 2, (64, num_envs))
    for action in actions[:5]:
        step(action)
    begin, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < seconds:
        step(actions[count % 64])
        count += 1
    return count * num_envs / taken


def report(title: str, rates: Rates) -> None:
    print(f"\n{title}")
    for name, values in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates[OURS], values, strict=True))
        print(
            f"  {name:32} {statistics.median(values):10,.0f} steps/s   ours / this {ratio:6.2f}", flush=True
        )


def cartpole(repeats: int, seconds: float) -> None:
    kinds = [partial(gym.make, "CartPole-v1")] * 64
    same_step = AutoresetMode.SAME_STEP
    makers: dict[str, Callable[[], Any]] = {
        OURS: partial(SharedMemoryVectorEnv, kinds, num_workers=WORKERS, context="fork"),
        "gymnasium AsyncVectorEnv": partial(AsyncVectorEnv, kinds, context="fork", autoreset_mode=same_step),
        "gymnasium SyncVectorEnv": partial(SyncVectorEnv, kinds, autoreset_mode=same_step),
    }
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        makers["Stable-Baselines3 SubprocVecEnv"] = partial(SubprocVecEnv, kinds, start_method="fork")
    except ImportError:
        print("Stable-Baselines3 is not installed: pip install stable-baselines3")
    rates: Rates = {name: [] for name in makers}
    costs: Rates = {name: [] for name in makers}
    trainer = psutil.Process()
    for _ in range(repeats):
        for name, make in makers.items():
            env = make()
            env.reset()
            processes = [trainer, *trainer.children()]
            before, begin = _processor_seconds(processes), time.perf_counter()
            rates[name].append(rate(env.step, 64, seconds))
            # Those of the warm-up are steps, too.
            steps = rates[name][-1] * (time.perf_counter() - begin)
            costs[name].append(1e6 * (_processor_seconds(processes) - before) / steps)
            env.close()
    report(f"CartPole-v1, 64 environments, {WORKERS} workers", rates)
    print("Processor time of trainer and workers a step, whatever else the machine does")
    for name, values in costs.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(costs[OURS], values, strict=True))
        print(
            f"  {name:32} {statistics.median(values):10,.1f} µs        this / ours {ratio:6.2f}", flush=True
        )


def busy(repeats: int, seconds: float) -> None:
    kinds, fork = [partial(Busy, 1.0)] * 16, multiprocessing.get_context("fork")
    rates: Rates = {OURS: [], "computing alone": []}
    env = SharedMemoryVectorEnv(kinds, num_workers=WORKERS)
    env.reset()
    for _ in range(repeats):
        rates[OURS].append(rate(env.step, 16, seconds))
        barrier, steps = fork.Barrier(WORKERS + 1), int(1000 * seconds)
        processes = [fork.Process(target=compute_alone, args=(steps, 1.0, barrier)) for _ in range(WORKERS)]
        for process in processes:
            process.start()
        barrier.wait()
        begin = time.perf_counter()
        barrier.wait()
        rates["computing alone"].append(WORKERS * steps / (time.perf_counter() - begin))
        for process in processes:
            process.join()
    env.close()
    report(f"1 ms a step, 16 environments, {WORKERS} workers", rates)


def idle(seconds: float) -> None:
    print(
        f"\nProcessor time of the workers during a policy's 20 ms, 8 environments, {WORKERS} workers of ours"
    )
    kinds = [partial(Busy, 0.0)] * 8
    for name, make in (
        (OURS, partial(SharedMemoryVectorEnv, kinds, num_workers=WORKERS, context="fork")),
        ("gymnasium AsyncVectorEnv", partial(AsyncVectorEnv, kinds, context="fork")),
    ):
        env, used, policy = make(), 0.0, 0.0
        workers = psutil.Process().children()
        env.reset()
        while policy < seconds:
            env.step(np.zeros(8, np.int64))
            before, begin = _processor_seconds(workers), time.perf_counter()
            time.sleep(0.02)
            used += _processor_seconds(workers) - before
            policy += time.perf_counter() - begin
        env.close()
        print(f"  {name:32} {used / policy:10.2%} of one processor", flush=True)


def _processor_seconds(processes: list[psutil.Process]) -> float:
    # To the nanosecond; what psutil tells is in ticks of 10 ms.
    stats = [Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii") for process in processes]
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def mixed(repeats: int, seconds: float) -> None:
    kinds = [*[partial(Busy, 1.0)] * 4, *[partial(Busy, 10.0)] * 4]
    synchronous = SharedMemoryVectorEnv(kinds, num_workers=WORKERS)
    first_ready = SharedMemoryVectorEnv(kinds, num_workers=WORKERS, batch_size=4)
    rates: Rates = {OURS: [], "the same, synchronous": []}
    synchronous.reset()
    first_ready.reset()
    for _ in range(repeats):
        rates["the same, synchronous"].append(rate(synchronous.step, 8, seconds))
        first_ready.send(np.zeros(8, np.int64))
        rates[OURS].append(rate(partial(_take_turns, first_ready), 4, seconds))
        first_ready.reset()
    synchronous.close()
    first_ready.close()
    report("1 ms and 10 ms a step, 4 environments each, batch_size 4", rates)


def _take_turns(env: SharedMemoryVectorEnv, actions: Any) -> None:
    env.send(actions, env.recv().env_ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each side in each repeat")
    options = parser.parse_args()
    cartpole(options.repeats, options.seconds)
    busy(options.repeats, options.seconds)
    idle(2 * options.seconds)
    mixed(options.repeats, options.seconds)


if __name__ == "__main__":
    main()
