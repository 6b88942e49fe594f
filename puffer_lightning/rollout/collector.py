"""Policy × environments → rollout."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from puffer_lightning.distributed import Preemption, derive_seed, rank, set_generator
from puffer_lightning.envs.state import NoStateError, get_state, set_state
from puffer_lightning.policies import Action, Policy, State, unmasked
from puffer_lightning.rollout.buffers import DeviceBuffers, HostBuffers, RolloutBuffers, StepBuffers
from puffer_lightning.rollout.episodes import finished_episodes
from puffer_lightning.rollout.minibatches import CACHED_ROWS
from puffer_lightning.rollout.phases import Measure, unmeasured
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.stepper import DeviceStepper, Stepper, make_stepper

Actor = Callable[..., Action]
"""Takes what ``Policy.act`` does."""

# A rank is not told to stop before it has made this share of its steps. Shorter rollouts teach little.
_LEAST_SHARE = 0.25
# Observations that a GPU values at a time.
_ROWS_ON_GPU = 262_144


class Collector:
    """Steps a vector environment with a policy, ``horizon`` steps at a time.

    Episodes go on from one rollout to the next. Memory is allocated at the first rollout and reused: a
    rollout is valid until the next ``collect``. Only the actions are waited for; of device-resident
    environments, whose observations are tensors, nothing is before the rollout's end.

    Args:
        env: The environments, N of them.
        horizon: T, steps of each environment in a rollout.
        seed: The run's seed. Environments start from it (those of rank r as the run's r·N-th and on) and so
            does action sampling, differently on each rank.
        device: Where the policy is and the rollout's tensors shall be.
        preemption: Says when to stop early, if this rank may have to.

    Raises:
        ConfigurationError: The environment does not say how it resets, or its action mask does not fit.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        horizon: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        preemption: Preemption | None = None,
    ) -> None:
        self.env = env
        self.horizon = horizon
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(derive_seed(seed, "actions", rank()))
        self._stepper = self._begin(derive_seed(seed, "environments") + rank() * env.num_envs)
        self._under_way = torch.zeros(2, env.num_envs, dtype=torch.float64)
        self._preemption = preemption
        self._between_rollouts = True
        self._buffers: RolloutBuffers | None = None
        self._state: State = ()
        self._saved_state: list[Tensor] = []

    @torch.no_grad()
    def collect(self, policy: Policy, act: Actor | None = None, measure: Measure = unmeasured) -> Rollout:
        """Collect the next rollout.

        Args:
            policy: Chooses the actions; its parameters must stay as they are during the call.
            act: Stands in for ``policy.act``, such as a compiled version of it.
            measure: Has the phases of the rollout measured.

        Returns:
            The rollout, in memory that the next call overwrites.
        """
        if self._buffers is None:
            self._buffers = self._allocate(policy)
            self._state = self._first_state(policy)
        self._between_rollouts = False
        buffers = self._buffers
        rollout = buffers.rollout
        rollout.began, rollout.state = time.perf_counter(), self._state
        rollout.preempted_at = None
        if self._preemption is not None:
            self._preemption.begin()
        # One draw for the whole rollout: an action's noise depends on its step and environment alone.
        policy.head.fill_noise(buffers.noise, self._generator)
        self._fill(policy, measure("rollout/policy", act or policy.act), measure)
        steps = buffers.flush()
        if rollout.preempted_at is not None:
            _drop(rollout.preempted_at, rollout, steps)
        elif self._preemption is not None:
            self._preemption.finish()
        measure("rollout/policy", self._fill_next_values)(policy, buffers)
        ended = steps["terminated"] | steps["truncated"]
        rollout.episode_returns, rollout.episode_lengths, self._under_way = finished_episodes(
            steps["rewards"], steps["valid"], ended, self._under_way.to(ended.device)
        )
        rollout.episode_rows = ended.nonzero()[:, 1]
        rollout.agent_types = getattr(self.env, "agent_types", ())
        rollout.seconds = time.perf_counter() - rollout.began
        self._between_rollouts = True
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Where collecting stands, for a checkpoint.

        Returns:
            ``actions``, the generator of the actions' noise; ``rows``, what there is of each environment,
            tensors [N, ...] or lists of N, nested by name; ``rest`` of the environments' state. Or, in place
            of the last two, ``lost``: why the episodes under way cannot be resumed.
        """
        state: dict[str, Any] = {"actions": self._generator.get_state()}
        if not self._between_rollouts:
            return {**state, "lost": "the checkpoint was written within a rollout"}
        try:
            envs = get_state(self.env)
        except NoStateError as reason:
            return {**state, "lost": str(reason)}
        memory = self._saved_state if self._buffers is None else tree_leaves(self._state)
        rows = {
            "environments": envs["rows"],
            "stepper": self._stepper.state_dict(),
            "under_way": self._under_way.t().to("cpu", copy=True),
            "memory": {str(i): leaf.cpu().clone() for i, leaf in enumerate(memory)},
        }
        return {**state, "rows": rows, "rest": envs["rest"]}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Take up where ``state_dict`` left off.

        Args:
            state: Without what is missing: a generator that is, stays as it is.

        Returns:
            Why the episodes that were under way are not, if so: then new ones have begun.
        """
        if "actions" in state:
            set_generator(self._generator, state["actions"])
        if "lost" in state:
            return str(state["lost"])
        rows = state["rows"]
        try:
            set_state(self.env, {"rows": rows["environments"], "rest": state["rest"]})
            self._stepper.load_state_dict(rows["stepper"])
        except (NoStateError, ValueError) as reason:
            self._stepper.reset()
            return str(reason)
        self._under_way = rows["under_way"].t().clone()
        self._saved_state = list(rows["memory"].values())
        return None

    def _first_state(self, policy: Policy) -> State:
        leaves, spec = tree_flatten(policy.initial_state(self.env.num_envs, self.device))
        if self._saved_state:
            leaves = [leaf.to(self.device) for leaf in self._saved_state]
        return tree_unflatten(leaves, spec)

    def _begin(self, seed: int) -> Stepper:
        """Reset the environments and take them up."""
        return make_stepper(self.env, seed)

    def _allocate(self, policy: Policy) -> RolloutBuffers:
        """The memory of the rollouts."""
        kind = DeviceBuffers if isinstance(self._stepper, DeviceStepper) else HostBuffers
        return kind(self._stepper.observations, policy, self.horizon, self.device)

    def _fill(self, policy: Policy, act: Actor, measure: Measure) -> None:
        """Make the T · N steps, or fewer if told to, and leave the policy's state as it is after them."""
        stepper, buffers, head, state = self._stepper, self._buffers, policy.head, self._state
        assert isinstance(buffers, StepBuffers)
        write_observations = measure("rollout/copy", buffers.write_observations)
        write_action = measure("rollout/copy", buffers.write_action)
        write_step = measure("rollout/copy", buffers.write_step)
        to_env = measure("rollout/copy", lambda actions: stepper.to_env(head.to_env(actions)))
        step_env = measure("rollout/env", stepper.step)
        remembers = bool(tree_leaves(state))
        if policy.separate_critic:
            act = partial(act, values=False)
        for t in range(self.horizon):
            if self._preempted(t):
                buffers.rollout.preempted_at = t
                break
            observations, noise = write_observations(t, stepper.observations)
            action = act(observations, noise, state)
            write_action(t, action)
            step = step_env(to_env(action.actions))
            write_step(t, step, action.state)
            if remembers:
                state = policy.restart(action.state, torch.as_tensor(step.started, device=self.device))
        self._state = state
        if policy.separate_critic:
            measure("rollout/policy", _fill_values)(policy, buffers.rollout)

    def _preempted(self, t: int) -> bool:
        if self._preemption is None or t < math.ceil(_LEAST_SHARE * self.horizon):
            return False
        return self._preemption.due()

    def _fill_next_values(self, policy: Policy, buffers: RolloutBuffers) -> None:
        """V of where each step led, with one forward pass for all observations no step acted on."""
        rollout, num_envs = buffers.rollout, self.env.num_envs
        replaced = self._stepper.autoreset_mode is not AutoresetMode.NEXT_STEP
        cut_off = buffers.cut_off() if replaced else None
        observations, state = buffers.on_device(unmasked(self._stepper.observations)), self._state
        if cut_off is not None:
            observations = tree_map(lambda *parts: torch.cat(parts), observations, cut_off.observations)
            state = tree_map(lambda *parts: torch.cat(parts), state, cut_off.state)
        values = policy.value(observations, state)
        rollout.next_values[:-1] = rollout.values[1:]
        rollout.next_values[rollout.made - 1] = values[:num_envs]
        if replaced:
            # The next row is of another episode. Where the final observation is lost, the one before it is
            # the closest to it.
            torch.where(rollout.truncated, rollout.values, rollout.next_values, out=rollout.next_values)
        if cut_off is not None:
            rollout.next_values[cut_off.times, cut_off.rows] = values[num_envs:]


def _fill_values(policy: Policy, rollout: Rollout) -> None:
    """V of what each step saw."""
    seen = tree_map(lambda leaf: leaf.flatten(0, 1), unmasked(rollout.observations))
    values = rollout.values.view(-1)
    size = CACHED_ROWS if values.device.type == "cpu" else _ROWS_ON_GPU
    for begin in range(0, len(values), size):
        rows = slice(begin, begin + size)
        values[rows] = policy.value(tree_map(lambda leaf, rows=rows: leaf[rows], seen))


def _drop(begin: int, rollout: Rollout, steps: dict[str, Tensor]) -> None:
    """Mark the rows from ``begin`` on as not made, here and where they were written."""
    for name, written in steps.items():
        written[begin:] = getattr(rollout, name)[begin:] = 0
    rollout.values[begin:] = rollout.next_values[begin:] = 0
