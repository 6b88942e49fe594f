"""Whole episodes of a policy: for evaluation, videos and datasets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from puffer_lightning.policies import Policy
from puffer_lightning.rollout.stepper import DeviceStepper, make_stepper

# Device-resident environments are asked this often whether all episodes have ended.
_STEPS_WITHOUT_WAITING = 32


@dataclass
class Trajectory:
    """One episode of L steps.

    Attributes:
        observations: Pytree of arrays [L, ...], as the environment gave them before each action.
        actions: Array [L, ...], or a pytree of them, as the environment was given them.
        rewards: [L].
        terminated: Whether the last step reached a terminal state; otherwise it was truncated.
    """

    observations: Any
    actions: Any
    rewards: NDArray[Any]
    terminated: bool


@dataclass
class Episodes:
    """K finished episodes.

    Attributes:
        returns: [K] undiscounted.
        lengths: [K] in environment steps.
        trajectories: The episodes themselves, if they were recorded.
        agent_types: [A], names of the types of agents, if the environment tells: episode i is one of type
            i mod A.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    trajectories: list[Trajectory] = field(default_factory=list)
    agent_types: tuple[str, ...] = ()


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
    device = policy.device
    num_envs, head = env.num_envs, policy.head
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.zeros(num_envs, head.noise_size, device=device)
    stepper = make_stepper(env, seed)
    first_episode = torch.arange(num_envs, device=stepper.device)
    dealt = (num_episodes - first_episode + num_envs - 1) // num_envs
    played, one_step = torch.zeros_like(first_episode), torch.ones_like(first_episode)
    # The entry after the last takes what does not count.
    returns = torch.zeros(num_episodes + 1, dtype=torch.float64, device=stepper.device)
    lengths = torch.zeros(num_episodes + 1, dtype=torch.int64, device=stepper.device)
    recorder = _Recorder(num_envs) if record else None
    waits = record or on_step is not None or not isinstance(stepper, DeviceStepper)

    state = policy.initial_state(num_envs, device)
    if on_step:
        on_step()
    for number in count():
        if (waits or number % _STEPS_WITHOUT_WAITING == 0) and not (played < dealt).any():
            break
        if recorder:
            recorder.see(stepper.given)
        observations = tree_map(lambda leaf: torch.as_tensor(leaf, device=device), stepper.observations)
        if greedy:
            actions, state = policy.greedy(observations, state)
        else:
            head.fill_noise(noise, generator)
            actions, _, _, state = policy.act(observations, noise, state)
        given = stepper.to_env(head.to_env(actions))
        step = stepper.step(given)
        state = policy.restart(state, torch.as_tensor(step.started, device=device))
        if on_step:
            on_step()
        rewards, valid, terminated, truncated = (
            torch.as_tensor(part) for part in (step.rewards, step.valid, step.terminated, step.truncated)
        )
        counted = (played < dealt) & valid
        episode = torch.where(counted, first_episode + played * num_envs, num_episodes)
        returns.index_add_(0, episode, rewards.double())
        lengths.index_add_(0, episode, one_step)
        ended = counted & (terminated | truncated)
        played += ended
        if recorder:
            recorder.write(episode, given, step.rewards, counted, ended, terminated)
    trajectories = recorder.trajectories if recorder else {}
    return Episodes(
        returns[:-1].cpu().numpy(),
        lengths[:-1].cpu().numpy(),
        [trajectories[index] for index in sorted(trajectories)],
        getattr(env, "agent_types", ()),
    )


class _Recorder:
    """Keeps what happens in N environments on the host, and cuts it into episodes."""

    def __init__(self, num_envs: int) -> None:
        self.trajectories: dict[int, Trajectory] = {}
        self._steps: list[list[tuple[Any, Any, Any]]] = [[] for _ in range(num_envs)]
        self._seen: Any = None

    def see(self, observations: Any) -> None:
        """Take the observations [N, ...] that the next step is about."""
        self._seen = tree_map(_copy, observations)

    def write(
        self, episode: Any, actions: Any, rewards: Any, counted: Any, ended: Any, terminated: Any
    ) -> None:
        """Take a step, [N, ...] each: whose it is, what was done, earned, and whether it counts and ends."""
        given, earned, episode, counted, ended, terminated = tree_map(
            _copy, (actions, rewards, episode, counted, ended, terminated)
        )
        for row in np.flatnonzero(counted):
            steps = self._steps[row]
            steps.append(tree_map(lambda leaf, row=row: leaf[row], (self._seen, given, earned)))
            if ended[row]:
                self.trajectories[int(episode[row])] = _trajectory(steps, bool(terminated[row]))
                self._steps[row] = []


def _copy(batch: Any) -> NDArray[Any]:
    return np.array(batch.cpu().numpy() if isinstance(batch, Tensor) else batch)


def _trajectory(steps: list[tuple[Any, Any, Any]], terminated: bool) -> Trajectory:
    observations, actions, rewards = zip(*steps, strict=True)
    return Trajectory(
        observations=tree_map(lambda *leaves: np.stack(leaves), *observations),
        actions=tree_map(lambda *leaves: np.stack(leaves), *actions),
        rewards=np.asarray(rewards),
        terminated=terminated,
    )
