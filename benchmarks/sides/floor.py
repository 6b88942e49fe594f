"""How fast the work could be at best.

That is the network's arithmetic at the rate of large matrix products, and nothing but the environments'
steps, one after the other.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from puffer_lightning import policies
from puffer_lightning.engines import RolloutDataModule
from sides.ours import config
from sides.work import Work

_SECONDS = 1.0


def run(work: Work, seed: int, threads: int | None) -> dict[str, float]:
    """Environment steps a second of floor, environments and arithmetic, and what they were computed from."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads or 1)
    options = config(work, 1)
    data = RolloutDataModule(**options["data"])
    env, spec = data.training_env, options["model"]["policy"]
    device = torch.device("cuda" if options["trainer"]["accelerator"] == "gpu" else "cpu")
    kind = getattr(policies, spec["class_path"].rsplit(".", 1)[1])
    policy = kind(*data.spaces, **spec["init_args"]).to(device)
    observations, _ = env.reset(seed=seed)
    flops = flops_of_a_step(work, policy, torch.as_tensor(observations).to(device))
    arithmetic = matmul_rate(device) / flops
    actions = [env.action_space.sample() for _ in range(8)]
    if isinstance(observations, torch.Tensor):
        actions = [torch.as_tensor(action).to(device) for action in actions]
    stepping = _rate(lambda step: env.step(actions[step % 8]), device) * work.num_envs
    data.close()
    return {
        "sps": 1 / (1 / arithmetic + 1 / stepping),
        "environments": stepping,
        "arithmetic": arithmetic,
        "flops": flops,
        "threads": torch.get_num_threads(),
    }


def flops_of_a_step(work: Work, policy: policies.Policy, observations: torch.Tensor) -> float:
    """Floating-point operations of an environment step: acting, and a pass of the update for each epoch."""
    num_envs = len(observations)
    if work.network == "lstm":
        # In float64 torch's cells compute, whose products the counter knows.
        policy = policy.double()
    state = policy.initial_state(num_envs, observations.device)
    noise = torch.zeros(num_envs, policy.head.noise_size, device=observations.device)
    with FlopCounterMode(display=False) as acting, torch.no_grad():
        action = policy.act(observations, noise, state)
    with FlopCounterMode(display=False) as learning:
        if work.network == "lstm":
            started = torch.zeros(1, num_envs, dtype=torch.bool)
            log_probs, entropies, values = policy.evaluate(
                observations[None], action.actions[None], state, started
            )
        else:
            log_probs, entropies, values = policy.evaluate(observations, action.actions)
        (log_probs + entropies + values).sum().backward()
    return (acting.get_total_flops() + work.update_epochs * learning.get_total_flops()) / num_envs


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations a second of a product of two large float32 matrices."""
    size = 1024 if device.type == "cpu" else 8192
    matrix = torch.randn(size, size, device=device)
    return 2 * size**3 * _rate(lambda _: torch.mm(matrix, matrix), device)


def _rate(call: Callable[[int], Any], device: torch.device) -> float:
    """Calls a second."""
    for count in range(5):
        call(count)
    _wait(device)
    begin, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < _SECONDS:
        for _ in range(10):
            call(count)
            count += 1
        _wait(device)
    return count / taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
