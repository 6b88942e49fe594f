"""What environments that return NumPy arrays say of their steps, on its way to the rollout."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from puffer_lightning.policies import State
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.stepper import Step

STEP_FIELDS = ("rewards", "terminated", "truncated", "valid", "started")


class CutOff(NamedTuple):
    """The K truncated steps of a rollout whose final observations are in none of its rows.

    Attributes:
        times: [K] int64, step of each.
        rows: [K] int64, environment of each.
        observations: Pytree of tensors [K, ...], the final observations.
        state: Pytree of tensors [K, ...], the policy's state when it comes to see them.
    """

    times: Tensor
    rows: Tensor
    observations: Any
    state: State


class _Final(NamedTuple):
    """Final observations of some of the truncated steps; ``places`` is where they are in ``state``."""

    times: NDArray[np.intp]
    rows: NDArray[np.intp]
    observations: Any
    state: State
    places: NDArray[np.intp]


class HostSteps:
    """Rewards, flags and final observations, written to host memory.

    On the CPU that memory is the rollout's own; for a GPU it is pinned and sent at the end, without waiting.

    Args:
        rollout: Where all of it shall be.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._device = rollout.rewards.device
        self._host = {name: on_host(getattr(rollout, name)) for name in STEP_FIELDS}
        self._rewards, self._terminated, self._truncated, self._valid, self._started = (
            buffer.numpy() for buffer in self._host.values()
        )
        self._final: list[_Final] = []

    def write(self, at: int | tuple[NDArray[np.intp], NDArray[np.intp]], step: Step) -> None:
        """Store rewards and flags of a step t of all environments, or of some by their steps and rows."""
        self._rewards[at] = step.rewards
        self._terminated[at] = step.terminated
        self._truncated[at] = step.truncated
        self._valid[at] = step.valid
        self._started[at] = step.started

    def write_final(self, times: NDArray[np.intp], rows: NDArray[np.intp], step: Step, state: State) -> None:
        """Keep the final observations of a step.

        Args:
            times: [K], at which step of the rollout they were reached.
            rows: [K], in which environments.
            step: It holds them.
            state: Pytree of tensors [B, ...], the policy's state after the step, which stays as it is.
        """
        self._final.append(_Final(times, rows, step.final_observations, state, step.final_rows))

    def flush(self) -> dict[str, Tensor]:
        """Send what is still on the host alone to the device; returns the host's side of it by name."""
        if self._device.type != "cpu":
            for name, buffer in self._host.items():
                getattr(self._rollout, name).copy_(buffer, non_blocking=True)
        return self._host

    def cut_off(self) -> CutOff | None:
        """The truncated steps whose final observations were written, on the device, and none from now on.

        Where the environments did not hand over what they replaced, a warning says so.
        """
        found = [final for final in self._final if final.observations is not None]
        if len(found) < len(self._final):
            warn_of_lost_observations()
        self._final = []
        if not found:
            return None
        times, rows, observations, _, _ = zip(*found, strict=True)
        index = torch.from_numpy(np.stack((np.concatenate(times), np.concatenate(rows)))).to(self._device)
        at = [torch.from_numpy(final.places).to(self._device) for final in found]
        states = [
            tree_map(lambda leaf, places=places: leaf[places], final.state)
            for places, final in zip(at, found, strict=True)
        ]
        return CutOff(
            index[0],
            index[1],
            from_host(tree_map(lambda *parts: np.concatenate(parts), *observations), self._device),
            tree_map(lambda *parts: torch.cat(parts), *states),
        )


def on_host(tensor: Tensor) -> Tensor:
    """Host memory to write what shall be in ``tensor``: on the CPU itself, for a GPU pinned."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def from_host(observations: Any, device: torch.device) -> Any:
    """A copy of a pytree of arrays on the device."""
    return tree_map(lambda leaf: torch.from_numpy(np.array(leaf)).to(device), observations)


def warn_of_lost_observations() -> None:
    """Warn that truncated episodes end with observations that nobody hands over."""
    warnings.warn(
        'The environment truncates episodes without infos["final_obs"]: such a step bootstraps from the '
        "value of the observation that it was taken at, since that of the one it led to cannot be known.",
        stacklevel=2,
    )
