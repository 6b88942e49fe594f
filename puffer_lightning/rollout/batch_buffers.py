"""The memory of a rollout whose environments do not step together."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.policies import Action, Policy, State
from puffer_lightning.rollout.buffers import RolloutBuffers
from puffer_lightning.rollout.host_steps import CutOff, HostSteps, from_host
from puffer_lightning.rollout.stepper import Step


class Places(NamedTuple):
    """B transitions of a rollout.

    Attributes:
        times: [B], their steps.
        rows: [B], their environments.
    """

    times: NDArray[np.intp]
    rows: NDArray[np.intp]


class BatchBuffers(RolloutBuffers):
    """For environments that step in batches, each of which is at a step of its own.

    What is needed on the device is sent there batch by batch, and put in its places there. Arguments as of
    :class:`RolloutBuffers`.
    """

    def __init__(self, observations: Any, policy: Policy, horizon: int, device: torch.device) -> None:
        super().__init__(observations, policy, horizon, device)
        rollout = self.rollout

        def flat(tree: Any) -> list[Tensor]:
            return [leaf.flatten(0, 1) for leaf in tree_leaves(tree)]

        self._num_envs = rollout.num_envs
        self._noise = self.noise.flatten(0, 1)
        self._observations = flat(rollout.observations)
        self._decisions = flat((rollout.actions, rollout.log_probs, rollout.values))
        self._steps = HostSteps(rollout)

    def write_observations(self, at: Places, observations: Any) -> tuple[Any, Tensor]:
        """Store observations before a step; returns them, and the step's noise, on the device.

        Args:
            at: Which B steps.
            observations: Pytree of arrays [N, ...], of which the rows of ``at`` are looked at.
        """
        index = self._index(at)
        taken = tree_map(lambda leaf: self._send(leaf[at.rows]), observations)
        for target, leaf in zip(self._observations, tree_leaves(taken), strict=True):
            target.index_copy_(0, index, leaf)
        return taken, self._noise.index_select(0, index)

    def write_action(self, at: Places, action: Action) -> None:
        """Store what the policy decided at B steps."""
        index = self._index(at)
        decisions = tree_leaves((action.actions, action.log_probs, action.values))
        for target, leaf in zip(self._decisions, decisions, strict=True):
            target.index_copy_(0, index, leaf)

    def write_step(self, at: Places, step: Step, state: State = ()) -> None:
        """Store what the environments returned for B steps.

        Args:
            at: Which ones.
            step: What they returned.
            state: The policy's state after them, [B, ...]; it is kept.
        """
        self._steps.write(at, step)
        if step.final_rows.size:
            self._steps.write_final(at.times[step.final_rows], at.rows[step.final_rows], step, state)

    def flush(self) -> dict[str, Tensor]:
        """Send what is still on the host alone to the device; returns the host's side of it by name."""
        return self._steps.flush()

    def cut_off(self) -> CutOff | None:
        """The truncated steps whose final observations the environments replaced, on the device."""
        return self._steps.cut_off()

    def on_device(self, observations: Any) -> Any:
        """A copy on the device of observations that no step has acted on."""
        return from_host(observations, self.device)

    def _index(self, at: Places) -> Tensor:
        return self._send(at.times * self._num_envs + at.rows)

    def _send(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
