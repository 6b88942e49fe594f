"""Policy × environments → rollout."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.utils._pytree import tree_map

from puffer_lightning.distributed import derive_seed, rank
from puffer_lightning.policies import Action, Policy, State
from puffer_lightning.rollout.buffers import RolloutBuffers
from puffer_lightning.rollout.episodes import finished_episodes
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.stepper import Step, Stepper

Actor = Callable[[Any, Tensor, State], Action]


class Collector:
    """Steps a vector environment with a policy, ``horizon`` steps at a time.

    Episodes go on from one rollout to the next. Memory is allocated at the first rollout and reused: a
    rollout is valid until the next ``collect``. Only the actions are waited for.

    Args:
        env: The environments, N of them.
        horizon: T, steps of each environment in a rollout.
        seed: The run's seed. Environments start from it (those of rank r as the run's r·N-th and on) and so
            does action sampling, differently on each rank.
        device: Where the policy is and the rollout's tensors shall be.

    Raises:
        ConfigurationError: The environment does not say how it resets.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        horizon: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.env = env
        self.horizon = horizon
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(derive_seed(seed, "actions", rank()))
        self._stepper = Stepper(env)
        self._stepper.reset(derive_seed(seed, "environments") + rank() * env.num_envs)
        self._under_way = torch.zeros(2, env.num_envs, dtype=torch.float64)
        self._buffers: RolloutBuffers | None = None
        self._state: State = ()

    @torch.no_grad()
    def collect(self, policy: Policy, act: Actor | None = None) -> Rollout:
        """Collect the next rollout.

        Args:
            policy: Chooses the actions; its parameters must stay as they are during the call.
            act: Stands in for ``policy.act``, such as a compiled version of it.

        Returns:
            The rollout, in memory that the next call overwrites.
        """
        act = act or policy.act
        stepper, head = self._stepper, policy.head
        if self._buffers is None:
            self._buffers = RolloutBuffers(stepper.observations, policy, self.horizon, self.device)
            self._state = policy.initial_state(self.env.num_envs, self.device)
        buffers, state = self._buffers, self._state
        rollout = buffers.rollout
        rollout.began, rollout.state = time.perf_counter(), state
        # One draw for the whole rollout: an action's noise depends on its step and environment alone.
        head.fill_noise(buffers.noise, self._generator)
        cut_off: list[tuple[int, Step, State]] = []
        for t in range(self.horizon):
            observations, noise = buffers.write_observations(t, stepper.observations)
            action = act(observations, noise, state)
            buffers.write_action(t, action)
            step = stepper.step(head.to_env(action.actions).cpu().numpy())
            buffers.write_step(t, step)
            if step.final_observations is not None:
                cut_off.append((t, step, action.state))
            state = policy.restart(action.state, torch.from_numpy(step.started).to(self.device))
        self._state = state
        host = buffers.flush()
        self._fill_next_values(policy, rollout, cut_off)
        rollout.episode_returns, rollout.episode_lengths, self._under_way = finished_episodes(
            host["rewards"], host["valid"], host["terminated"] | host["truncated"], self._under_way
        )
        rollout.seconds = time.perf_counter() - rollout.began
        return rollout

    def _fill_next_values(
        self, policy: Policy, rollout: Rollout, cut_off: list[tuple[int, Step, State]]
    ) -> None:
        """V of where each step led, with one forward pass for all observations no step acted on."""
        observations = [self._stepper.observations, *(step.final_observations for _, step, _ in cut_off)]
        states = [self._state, *(self._rows(state, step.final_rows) for _, step, state in cut_off)]
        values = policy.value(
            tree_map(lambda *parts: torch.from_numpy(np.concatenate(parts)).to(self.device), *observations),
            tree_map(lambda *parts: torch.cat(parts), *states),
        )
        rollout.next_values[:-1] = rollout.values[1:]
        rollout.next_values[-1] = values[: self.env.num_envs]
        if cut_off:
            times = np.concatenate([np.full(step.final_rows.shape, t) for t, step, _ in cut_off])
            rows = np.concatenate([step.final_rows for _, step, _ in cut_off])
            index = torch.from_numpy(np.stack((times, rows))).to(self.device)
            rollout.next_values[index[0], index[1]] = values[self.env.num_envs :]

    def _rows(self, state: State, rows: Any) -> State:
        return tree_map(lambda leaf: leaf[torch.from_numpy(rows).to(self.device)], state)
