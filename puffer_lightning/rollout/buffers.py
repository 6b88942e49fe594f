"""The memory a rollout is written to, step by step."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.policies import Action, Policy
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.stepper import Step


class RolloutBuffers:
    """Allocated once, overwritten by each rollout.

    What the environments return is written to host memory, what the policy returns to the device. On the
    CPU the two are the same memory; for a GPU the host side is pinned, observations follow step by step and
    the rest at the end, none of it waited for.

    Args:
        observations: A batch of observations [N, ...] (pytree of arrays), for shapes and dtypes.
        policy: Its head gives the shapes of actions and noise.
        horizon: T.
        device: Where the rollout shall be.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        head = policy.head
        steps = (horizon, tree_leaves(observations)[0].shape[0])

        def on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        host_observations = tree_map(
            lambda leaf: on_host((horizon, *leaf.shape), torch.as_tensor(leaf[:0]).dtype), observations
        )
        self._host = {"rewards": on_host(steps, torch.float32)} | {
            name: on_host(steps, torch.bool) for name in ("terminated", "truncated", "valid")
        }
        self.noise = on_device(*steps, head.noise_size)
        self.rollout = Rollout(
            observations=tree_map(lambda leaf: leaf.to(device), host_observations),
            actions=on_device(*steps, *head.action_shape, dtype=head.action_dtype),
            log_probs=on_device(*steps),
            values=on_device(*steps),
            next_values=on_device(*steps),
            rewards=self._host["rewards"].to(device),
            terminated=self._host["terminated"].to(device),
            truncated=self._host["truncated"].to(device),
            valid=self._host["valid"].to(device),
        )
        self._copies = device.type != "cpu"
        # Looked up once: finding a row of a tensor costs as much as writing it.
        self._host_rows = [leaf.unbind() for leaf in tree_leaves(host_observations)]
        self._host_arrays = [leaf.numpy() for leaf in tree_leaves(host_observations)]
        self._device_rows = [leaf.unbind() for leaf in tree_leaves(self.rollout.observations)]
        self._rows = [tree_map(lambda leaf, t=t: leaf[t], self.rollout.observations) for t in range(horizon)]
        self._noise_rows = self.noise.unbind()
        self._action_rows = self.rollout.actions.unbind()
        self._log_prob_rows = self.rollout.log_probs.unbind()
        self._value_rows = self.rollout.values.unbind()
        self._rewards, self._terminated, self._truncated, self._valid = (
            buffer.numpy() for buffer in self._host.values()
        )

    def write_observations(self, t: int, observations: Any) -> tuple[Any, Tensor]:
        """Store the observations of step t; returns them, and the step's noise, on the device."""
        for array, leaf in zip(self._host_arrays, tree_leaves(observations), strict=True):
            np.copyto(array[t], leaf)
        if self._copies:
            for device_rows, host_rows in zip(self._device_rows, self._host_rows, strict=True):
                device_rows[t].copy_(host_rows[t], non_blocking=True)
        return self._rows[t], self._noise_rows[t]

    def write_action(self, t: int, action: Action) -> None:
        """Store what the policy decided at step t."""
        self._action_rows[t].copy_(action.actions)
        self._log_prob_rows[t].copy_(action.log_probs)
        self._value_rows[t].copy_(action.values)

    def write_step(self, t: int, step: Step) -> None:
        """Store what the environments returned for step t."""
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        self._valid[t] = step.valid

    def flush(self) -> dict[str, Tensor]:
        """Send what is still on the host alone to the device; returns the host's side of it by name."""
        if self._copies:
            for name, buffer in self._host.items():
                getattr(self.rollout, name).copy_(buffer, non_blocking=True)
        return self._host
