"""The memory a rollout is written to."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.policies import Action, Policy, State
from puffer_lightning.rollout.host_steps import (
    STEP_FIELDS,
    CutOff,
    HostSteps,
    from_host,
    on_host,
    warn_of_lost_observations,
)
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.stepper import Step


class RolloutBuffers(ABC):
    """Allocated once, overwritten by each rollout; how, the subclasses decide.

    Args:
        observations: A batch of observations [N, ...] (pytree of arrays or tensors), for shapes and dtypes.
        policy: Its head gives the shapes of actions and noise.
        horizon: T.
        device: Where the rollout shall be.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        head = policy.head
        steps = (horizon, tree_leaves(observations)[0].shape[0])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.noise = zeros(*steps, head.noise_size)
        self.rollout = Rollout(
            observations=tree_map(
                lambda leaf: zeros(horizon, *leaf.shape, dtype=torch.as_tensor(leaf[:0]).dtype), observations
            ),
            actions=head.empty_actions(*steps, device=device),
            log_probs=zeros(*steps),
            values=zeros(*steps),
            next_values=zeros(*steps),
            rewards=zeros(*steps),
            terminated=zeros(*steps, dtype=torch.bool),
            truncated=zeros(*steps, dtype=torch.bool),
            valid=zeros(*steps, dtype=torch.bool),
            started=zeros(*steps, dtype=torch.bool),
        )

    @abstractmethod
    def flush(self) -> dict[str, Tensor]:
        """Complete the rollout; returns what steps returned, [T, N] each, by name, as written."""

    @abstractmethod
    def cut_off(self) -> CutOff | None:
        """The truncated steps whose final observations the environments replaced, on the device.

        Not for NEXT_STEP environments, which replace none. Where the environments did not hand over what
        they replaced, a warning says so.
        """

    @abstractmethod
    def on_device(self, observations: Any) -> Any:
        """A copy on the device of observations that no step has acted on."""


class StepBuffers(RolloutBuffers):
    """For environments that step together: what they do is written step by step.

    What the policy returns is written to the device; where the environments' side is written to, the
    subclasses decide. Arguments as of :class:`RolloutBuffers`.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        super().__init__(observations, policy, horizon, device)
        # Looked up once: finding a row of a tensor costs as much as writing it.
        self._leaf_rows = [leaf.unbind() for leaf in tree_leaves(self.rollout.observations)]
        self._rows = [tree_map(lambda leaf, t=t: leaf[t], self.rollout.observations) for t in range(horizon)]
        self._noise_rows = self.noise.unbind()
        self._action_rows = [leaf.unbind() for leaf in tree_leaves(self.rollout.actions)]
        self._log_prob_rows = self.rollout.log_probs.unbind()
        self._value_rows = self.rollout.values.unbind()

    @abstractmethod
    def write_observations(self, t: int, observations: Any) -> tuple[Any, Tensor]:
        """Store the observations of step t; returns them, and the step's noise, on the device."""

    def write_action(self, t: int, action: Action) -> None:
        """Store what the policy decided at step t."""
        actions = action.actions
        leaves = (actions,) if isinstance(actions, Tensor) else tree_leaves(actions)
        for rows, leaf in zip(self._action_rows, leaves, strict=True):
            rows[t].copy_(leaf)
        self._log_prob_rows[t].copy_(action.log_probs)
        if action.values.numel():
            self._value_rows[t].copy_(action.values)

    @abstractmethod
    def write_step(self, t: int, step: Step, state: State = ()) -> None:
        """Store what the environments returned for step t, after which the policy's state was ``state``."""


class HostBuffers(StepBuffers):
    """For environments that return NumPy arrays.

    What they return is written to host memory. On the CPU that is the rollout's own; for a GPU it is pinned,
    observations follow step by step and the rest at the end, none of it waited for. Arguments as of
    :class:`RolloutBuffers`.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        super().__init__(observations, policy, horizon, device)
        self._copies = device.type != "cpu"
        leaves = [on_host(leaf) for leaf in tree_leaves(self.rollout.observations)]
        self._host_rows = [leaf.unbind() for leaf in leaves]
        self._host_arrays = [leaf.numpy() for leaf in leaves]
        self._steps = HostSteps(self.rollout)

    def write_observations(self, t: int, observations: Any) -> tuple[Any, Tensor]:
        """Store the observations of step t; returns them, and the step's noise, on the device."""
        # To flatten a lone array would take longer than to copy it.
        leaves = (observations,) if isinstance(observations, np.ndarray) else tree_leaves(observations)
        for array, leaf in zip(self._host_arrays, leaves, strict=True):
            array[t] = leaf
        if self._copies:
            for device_rows, host_rows in zip(self._leaf_rows, self._host_rows, strict=True):
                device_rows[t].copy_(host_rows[t], non_blocking=True)
        return self._rows[t], self._noise_rows[t]

    def write_step(self, t: int, step: Step, state: State = ()) -> None:
        """Store what the environments returned for step t, after which the policy's state was ``state``."""
        self._steps.write(t, step)
        if step.final_rows.size:
            times = np.full(step.final_rows.shape, t)
            self._steps.write_final(times, step.final_rows, step, state)

    def flush(self) -> dict[str, Tensor]:
        """Send what is still on the host alone to the device; returns the host's side of it by name."""
        return self._steps.flush()

    def cut_off(self) -> CutOff | None:
        """The truncated steps whose final observations the environments replaced, on the device."""
        return self._steps.cut_off()

    def on_device(self, observations: Any) -> Any:
        """A copy on the device of observations that no step has acted on."""
        return from_host(observations, self.device)


class DeviceBuffers(StepBuffers):
    """For environments that return tensors: all is written to the rollout itself, and nothing waited for.

    Which steps were truncated is asked once, after the rollout. Until then the final observations of all rows
    are kept, in memory as large as the rollout's observations, if the environments hand over any. Arguments
    as of :class:`RolloutBuffers`.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        super().__init__(observations, policy, horizon, device)
        self._step_rows = [getattr(self.rollout, name).unbind() for name in STEP_FIELDS]
        self._final: Any = None
        self._has_final = [False] * horizon
        self._states: list[State] = [()] * horizon

    def write_observations(self, t: int, observations: Any) -> tuple[Any, Tensor]:
        """Store the observations of step t; returns them, and the step's noise, on the device."""
        for rows, leaf in zip(self._leaf_rows, tree_leaves(observations), strict=True):
            rows[t].copy_(leaf, non_blocking=True)
        return self._rows[t], self._noise_rows[t]

    def write_step(self, t: int, step: Step, state: State = ()) -> None:
        """Store what the environments returned for step t, after which the policy's state was ``state``."""
        for rows, name in zip(self._step_rows, STEP_FIELDS, strict=True):
            rows[t].copy_(getattr(step, name), non_blocking=True)
        self._has_final[t] = step.final_observations is not None
        self._states[t] = state
        if self._has_final[t]:
            if self._final is None:
                self._final = tree_map(torch.zeros_like, self.rollout.observations)
            tree_map(lambda buffer, leaf: buffer[t].copy_(leaf), self._final, step.final_observations)

    def flush(self) -> dict[str, Tensor]:
        """What steps returned, [T, N] each, by name, on the device, where all of it is already."""
        return {name: getattr(self.rollout, name) for name in STEP_FIELDS}

    def cut_off(self) -> CutOff | None:
        """The truncated steps whose final observations the environments replaced, on the device."""
        cut = self.rollout.truncated & ~self.rollout.terminated
        known = torch.tensor(self._has_final, device=self.device).unsqueeze(1)
        if not all(self._has_final) and (cut & ~known).any():
            warn_of_lost_observations()
        if not any(self._has_final):
            return None
        times, rows = (cut & known).nonzero(as_tuple=True)
        return CutOff(
            times,
            rows,
            tree_map(lambda leaf: leaf[times, rows], self._final),
            tree_map(lambda *leaves: torch.stack(leaves)[times, rows], *self._states),
        )

    def on_device(self, observations: Any) -> Any:
        """A copy on the device of observations that no step has acted on."""
        return tree_map(lambda leaf: leaf.to(self.device, copy=True), observations)
