"""One way to step a vector environment, whichever of gymnasium's autoreset modes it has."""

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.errors import ConfigurationError

Flags = Any
"""[N] bool: a NumPy array or, of a device-resident environment, a tensor."""

_NO_ROWS: NDArray[np.intp] = np.zeros(0, dtype=np.intp)


class Step(NamedTuple):
    """What one step of N environments returned: NumPy arrays, or tensors on the environments' device.

    Attributes:
        rewards: [N].
        terminated: [N] bool.
        truncated: [N] bool.
        valid: [N] bool, False where this step only reset the environment (NEXT_STEP) and ignored its action,
            or where the environment says that it is not to be learned from (``infos["masked"]``).
        started: [N] bool, the next observation is the first of an episode.
        final_observations: Rows of final observations, [K, ...] for the K environments set in
            ``final_rows``; ``None`` where none is needed, where the next observation is the final one itself
            and where the environments do not tell. Of device-resident environments all rows [N, ...].
        final_rows: [K] int, environments whose episode was truncated at this step and whose final
            observation is no longer to be seen in ``Stepper.observations``. Empty for device-resident
            environments: to know would be to wait for the device.
    """

    rewards: Any
    terminated: Flags
    truncated: Flags
    valid: Flags
    started: Flags
    final_observations: Any = None
    final_rows: NDArray[np.intp] = _NO_ROWS


class Stepper:
    """A vector environment and where its episodes stand.

    After a step, ``observations`` holds what the policy acts on next. In NEXT_STEP mode that is, for an
    episode that just ended, its final observation, and the step after it is not ``valid``. In SAME_STEP and
    DISABLED mode it is the first observation of the next episode, and the final one, which a truncated step
    bootstraps from, is in the ``Step``.

    Args:
        env: The environment; ``env.metadata["autoreset_mode"]`` says how it resets.

    Attributes:
        device: Where steps come from.

    Raises:
        ConfigurationError: The environment does not say how it resets.
    """

    device = torch.device("cpu")

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.env = env
        mode = env.metadata.get("autoreset_mode")
        try:
            self.autoreset_mode = AutoresetMode(mode)
        except ValueError:
            raise ConfigurationError(
                f'{type(env).__name__} does not say how it resets: set metadata["autoreset_mode"] to one of '
                f"gymnasium.vector.AutoresetMode (it is {mode!r})."
            ) from None
        self.observations: Any = None

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment.

        Args:
            seed: Given to the vector environment; gymnasium's own give environment i the seed ``seed + i``.
        """
        observations, _ = self.env.reset(seed=seed)
        self.begin(observations)

    def begin(self, observations: Any) -> None:
        """Take up the observations of a reset that was done."""
        self.observations = observations
        self._ended: Flags = np.zeros(self.env.num_envs, dtype=np.bool_)
        self._all_valid: Flags = ~self._ended

    def to_env(self, actions: Tensor) -> Any:
        """A batch of the environment's ``action_space`` [N, ...] as the environment takes it."""
        return actions.cpu().numpy()

    def step(self, actions: Any) -> Step:
        """Step every environment once.

        Args:
            actions: A batch of the environment's ``action_space``, as of ``to_env``.
        """
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        valid = ~infos["masked"] if "masked" in infos else self._all_valid
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            started, self._ended = self._ended, ended
            self.observations = observations
            return Step(rewards, terminated, truncated, valid=valid & ~started, started=started)
        self.observations, final, rows = self._after_ends(observations, terminated, truncated, ended, infos)
        return Step(rewards, terminated, truncated, valid, ended, final, rows)

    def _after_ends(
        self, observations: Any, terminated: Flags, truncated: Flags, ended: Flags, infos: dict[str, Any]
    ) -> tuple[Any, Any, NDArray[np.intp]]:
        """What the policy acts on next, the final observations and whose they are (not in NEXT_STEP mode)."""
        if not ended.any():
            return observations, None, _NO_ROWS
        rows = np.flatnonzero(truncated & ~terminated)
        final = None
        if self.autoreset_mode is AutoresetMode.DISABLED:
            # Copied before the reset, which may reuse the memory.
            final = tree_map(lambda leaf: np.array(leaf[rows]), observations) if rows.size else None
            observations, _ = self.env.reset(options={"reset_mask": ended})
        elif rows.size and "final_obs" in infos:
            final = _stack([infos["final_obs"][row] for row in rows], observations)
        return observations, final, rows


class DeviceStepper(Stepper):
    """The same for an environment that takes and returns tensors; nothing waits for its device.

    Since nobody looks whether an episode ended, a DISABLED environment is reset by mask after every step,
    most often with a mask that is False everywhere.
    """

    def begin(self, observations: Any) -> None:
        """Take up the observations of a reset that was done."""
        self.observations = observations
        self.device = tree_leaves(observations)[0].device
        self._ended = torch.zeros(self.env.num_envs, dtype=torch.bool, device=self.device)
        self._all_valid = ~self._ended

    def to_env(self, actions: Tensor) -> Any:
        """The actions on the environment's device."""
        return actions.to(self.device)

    def _after_ends(
        self, observations: Any, terminated: Flags, truncated: Flags, ended: Flags, infos: dict[str, Any]
    ) -> tuple[Any, Any, NDArray[np.intp]]:
        final = infos.get("final_obs")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            final = tree_map(torch.clone, observations)
            observations, _ = self.env.reset(options={"reset_mask": ended})
        return observations, final, _NO_ROWS


def make_stepper(env: VectorEnv[Any, Any, Any], seed: int | None = None) -> Stepper:
    """Reset an environment and take it up.

    Args:
        env: N environments. They are device-resident if the observations of the reset are tensors.
        seed: Given to the vector environment.

    Raises:
        ConfigurationError: The environment does not say how it resets.
    """
    stepper = Stepper(env)
    observations, _ = env.reset(seed=seed)
    if isinstance(tree_leaves(observations)[0], Tensor):
        stepper = DeviceStepper(env)
    stepper.begin(observations)
    return stepper


def _stack(observations: list[Any], like: Any) -> Any:
    # An environment's own observations may be of other dtypes (float64, int) than its space and so the batch.
    return tree_map(
        lambda batch, *leaves: np.stack(leaves, dtype=batch.dtype, casting="unsafe"), like, *observations
    )
