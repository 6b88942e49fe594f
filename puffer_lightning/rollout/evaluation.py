"""Whole episodes of a policy: for evaluation, videos and datasets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from puffer_lightning.policies import Policy
from puffer_lightning.rollout.stepper import Stepper


@dataclass
class Trajectory:
    """One episode of L steps.

    Attributes:
        observations: Pytree of arrays [L, ...], what the policy saw before each action.
        actions: [L, ...] as the environment was given them.
        rewards: [L].
        terminated: Whether the last step reached a terminal state; otherwise it was truncated.
    """

    observations: Any
    actions: NDArray[Any]
    rewards: NDArray[Any]
    terminated: bool


@dataclass
class Episodes:
    """K finished episodes.

    Attributes:
        returns: [K] undiscounted.
        lengths: [K] in environment steps.
        trajectories: The episodes themselves, if they were recorded.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    trajectories: list[Trajectory] = field(default_factory=list)


@torch.no_grad()
def play(
    policy: Policy,
    env: VectorEnv[Any, Any, Any],
    num_episodes: int,
    *,
    seed: int,
    greedy: bool = True,
    record: bool = False,
    on_step: Callable[[], object] | None = None,
) -> Episodes:
    """Play episodes from their start to their end.

    The episodes are dealt out to the environments beforehand. Taking whichever end first would favour short
    ones.

    Args:
        policy: Chooses the actions.
        env: N environments, reset at the start.
        num_episodes: K.
        seed: For the environments and, if not ``greedy``, for the actions.
        greedy: Take the mode of the policy's distribution rather than a sample.
        record: Keep the trajectories.
        on_step: Called once after the reset and after each step, for instance to render a frame.

    Returns:
        The K episodes, in an order that does not depend on how long they took.
    """
    device = next(policy.parameters()).device
    num_envs, head = env.num_envs, policy.head
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.zeros(num_envs, head.noise_size, device=device)
    first_episode = np.arange(num_envs)
    dealt = (num_episodes - first_episode + num_envs - 1) // num_envs
    played = np.zeros(num_envs, dtype=np.int64)
    returns, lengths = np.zeros(num_episodes), np.zeros(num_episodes, dtype=np.int64)
    steps: list[list[tuple[Any, Any, Any]]] = [[] for _ in range(num_envs)]
    trajectories: dict[int, Trajectory] = {}

    stepper = Stepper(env)
    stepper.reset(seed)
    state = policy.initial_state(num_envs, device)
    if on_step:
        on_step()
    while (playing := played < dealt).any():
        seen = tree_map(np.copy, stepper.observations) if record else None
        observations = tree_map(lambda leaf: torch.as_tensor(leaf, device=device), stepper.observations)
        if greedy:
            actions, state = policy.greedy(observations, state)
        else:
            head.fill_noise(noise, generator)
            actions, _, _, state = policy.act(observations, noise, state)
        given = head.to_env(actions).cpu().numpy()
        step = stepper.step(given)
        state = policy.restart(state, torch.from_numpy(step.started).to(device))
        if on_step:
            on_step()
        rows = np.flatnonzero(playing & step.valid)
        episode = first_episode + played * num_envs
        returns[episode[rows]] += step.rewards[rows]
        lengths[episode[rows]] += 1
        if record:
            for row in rows:
                steps[row].append(
                    (tree_map(lambda leaf, row=row: leaf[row], seen), given[row], step.rewards[row])
                )
        for row in rows[(step.terminated | step.truncated)[rows]]:
            played[row] += 1
            if record:
                trajectories[episode[row]] = _trajectory(steps[row], bool(step.terminated[row]))
                steps[row] = []
    return Episodes(returns, lengths, [trajectories[index] for index in sorted(trajectories)])


def _trajectory(steps: list[tuple[Any, Any, Any]], terminated: bool) -> Trajectory:
    observations, actions, rewards = zip(*steps, strict=True)
    return Trajectory(
        observations=tree_map(lambda *leaves: np.stack(leaves), *observations),
        actions=np.stack(actions),
        rewards=np.asarray(rewards),
        terminated=terminated,
    )
