"""One way to step a vector environment, whichever of gymnasium's autoreset modes it has."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import ACTION_MASK, MaskedObservations, MaskLayout, without_mask

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
        started: [N] bool, the next observation is the first of an episode. The environment says so itself
            (``infos["started"]``) where an episode does not begin as soon as the one before it has ended.
        final_observations: Rows of final observations, [K, ...] for the K environments set in
            ``final_rows``, without action masks; ``None`` where none is needed, where the next observation is
            the final one itself and where the environments do not tell. Of device-resident environments all
            rows [N, ...].
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

    Environments that mask actions give an ``action_mask``, in their Dict observations or in their infos, with
    the reset and with every step; :class:`~puffer_lightning.policies.MaskLayout` says how it may look. Then
    ``observations`` are :class:`~puffer_lightning.policies.MaskedObservations`; ``given`` are the
    observations as the environment gave them.

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
        self._mask_layout: MaskLayout | None = None
        self.observations: Any = None
        self.given: Any = None

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment.

        Args:
            seed: Given to the vector environment; gymnasium's own give environment i the seed ``seed + i``.
        """
        observations, infos = self.env.reset(seed=seed)
        self.begin(observations, infos)

    def begin(self, observations: Any, infos: dict[str, Any]) -> None:
        """Take up what a reset that was done returned."""
        self._ended: Flags = np.zeros(self.env.num_envs, dtype=np.bool_)
        self._all_valid: Flags = ~self._ended
        if _mask_in(observations, infos):
            self._mask_layout = MaskLayout(self.env.single_action_space)
        self._see(observations, self._mask(observations, infos))

    def state_dict(self) -> dict[str, Any]:
        """What the policy acts on next and whose episode has ended: tensors [N, ...] on the host."""
        seen = {str(i): _on_host(leaf) for i, leaf in enumerate(tree_leaves(self.observations))}
        return {"observations": seen, "ended": _on_host(self._ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` left off, once the environments themselves have.

        Raises:
            ValueError: It is of other observations.
        """
        leaves, spec = tree_flatten(self.observations)
        saved = list(state["observations"].values())
        if [leaf.shape for leaf in saved] != [torch.Size(leaf.shape) for leaf in leaves]:
            raise ValueError("the observations have other shapes")
        seen = [_like(leaf, there) for leaf, there in zip(leaves, saved, strict=True)]
        self.observations = self.given = tree_unflatten(seen, spec)
        self._ended = _like(self._ended, state["ended"])

    def to_env(self, actions: Any) -> Any:
        """A batch of the environment's ``action_space``, tensors [N, ...], as the environment takes it."""
        return _map(lambda leaf: (leaf if leaf.is_cpu else leaf.cpu()).numpy(), actions)

    def step(self, actions: Any) -> Step:
        """Step every environment once.

        Args:
            actions: A batch of the environment's ``action_space``, as of ``to_env``.

        Raises:
            ConfigurationError: An action mask does not fit the action space or leaves nothing to choose.
        """
        return self._take(*self.env.step(actions))

    def _take(
        self, observations: Any, rewards: Any, terminated: Flags, truncated: Flags, infos: dict[str, Any]
    ) -> Step:
        ended = terminated | truncated
        valid = ~infos["masked"] if "masked" in infos else self._all_valid
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            started = self._exchange_ended(ended)
            mask = self._mask(observations, infos)
            # Nothing is to be chosen after an episode's end, and the mask may well say so.
            self._see(observations, mask if mask is None else mask | ended[:, None])
            return Step(rewards, terminated, truncated, valid=valid & ~started, started=started)
        final, rows = self._after_ends(observations, terminated, truncated, ended, infos)
        return Step(rewards, terminated, truncated, valid, infos.get("started", ended), final, rows)

    def _exchange_ended(self, ended: Flags) -> Flags:
        """Remember whose episode ended with this step; whose did with the step before."""
        before, self._ended = self._ended, ended
        return before

    def _after_ends(
        self, observations: Any, terminated: Flags, truncated: Flags, ended: Flags, infos: dict[str, Any]
    ) -> tuple[Any, NDArray[np.intp]]:
        """See what the policy acts on next; the final observations and their rows (not in NEXT_STEP mode)."""
        mask = self._mask(observations, infos)
        if not ended.any():
            self._see(observations, mask)
            return None, _NO_ROWS
        rows = np.flatnonzero(truncated & ~terminated)
        final = None
        if self.autoreset_mode is AutoresetMode.DISABLED:
            # Copied before the reset, which may reuse the memory.
            final = tree_map(lambda leaf: np.array(leaf[rows]), observations) if rows.size else None
            observations, after_reset = self._reset_ended(ended)
            if mask is not None and after_reset is not None:
                mask = np.where(ended[:, None], after_reset, mask)
        elif rows.size and "final_obs" in infos:
            final = _stack([infos["final_obs"][row] for row in rows], observations)
        self._see(observations, mask)
        return without_mask(final), rows

    def _reset_ended(self, ended: Flags) -> tuple[Any, Flags | None]:
        """Observations and action mask after a reset of the environments whose episode ended."""
        observations, infos = self.env.reset(options={"reset_mask": ended})
        return observations, self._mask(observations, infos)

    def _mask(self, observations: Any, infos: dict[str, Any]) -> Flags | None:
        """[N, num_choices], unchecked; None where no actions are masked."""
        layout = self._mask_layout
        found = _mask_in(observations, infos)
        if layout is None:
            if found:
                raise ConfigurationError(
                    f"{type(self.env).__name__} gives an {ACTION_MASK} with a step but gave none with the "
                    "reset: give it with both."
                )
            return None
        num_envs = len(tree_leaves(observations)[0])
        if not found:
            return np.ones((num_envs, layout.num_choices), dtype=np.bool_)
        if isinstance(observations, dict) and ACTION_MASK in observations:
            return layout.rows(observations[ACTION_MASK], num_envs)
        return layout.rows(infos[ACTION_MASK], num_envs, infos.get(f"_{ACTION_MASK}"))

    def _see(self, observations: Any, mask: Flags | None) -> None:
        self.given = self.observations = observations
        if mask is not None:
            assert self._mask_layout is not None
            self._mask_layout.check(mask)
            self.observations = MaskedObservations(without_mask(observations), mask)


class DeviceStepper(Stepper):
    """The same for an environment that takes and returns tensors; nothing waits for its device.

    Since nobody looks whether an episode ended, a DISABLED environment is reset by mask after every step,
    most often with a mask that is False everywhere. Actions cannot be masked.
    """

    def begin(self, observations: Any, infos: dict[str, Any]) -> None:
        """Take up what a reset that was done returned.

        Raises:
            ConfigurationError: The environment masks actions.
        """
        if _mask_in(observations, infos):
            raise ConfigurationError(
                f"{type(self.env).__name__} gives an {ACTION_MASK} and its observations are tensors: give "
                "NumPy arrays, since the actions of device-resident environments cannot be masked."
            )
        self.device = tree_leaves(observations)[0].device
        self._ended = torch.zeros(self.env.num_envs, dtype=torch.bool, device=self.device)
        self._all_valid = ~self._ended
        self._see(observations, None)

    def to_env(self, actions: Any) -> Any:
        """The actions on the environment's device."""
        return _map(lambda leaf: leaf.to(self.device), actions)

    def _after_ends(
        self, observations: Any, terminated: Flags, truncated: Flags, ended: Flags, infos: dict[str, Any]
    ) -> tuple[Any, NDArray[np.intp]]:
        final = infos.get("final_obs")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            final = tree_map(torch.clone, observations)
            observations, _ = self.env.reset(options={"reset_mask": ended})
        self._see(observations, None)
        return final, _NO_ROWS


def make_stepper(env: VectorEnv[Any, Any, Any], seed: int | None = None) -> Stepper:
    """Reset an environment and take it up.

    Args:
        env: N environments. They are device-resident if the observations of the reset are tensors.
        seed: Given to the vector environment.

    Raises:
        ConfigurationError: The environment does not say how it resets, or its action mask does not fit.
    """
    stepper = Stepper(env)
    observations, infos = env.reset(seed=seed)
    if isinstance(tree_leaves(observations)[0], Tensor):
        stepper = DeviceStepper(env)
    stepper.begin(observations, infos)
    return stepper


def _on_host(leaf: Any) -> Tensor:
    return torch.as_tensor(leaf).to("cpu", copy=True)


def _like(leaf: Any, saved: Tensor) -> Any:
    """A copy of a saved tensor as what it was saved from: an array, or a tensor on its device."""
    return saved.to(leaf.device, copy=True) if isinstance(leaf, Tensor) else saved.numpy().copy()


def _mask_in(observations: Any, infos: dict[str, Any]) -> bool:
    return ACTION_MASK in infos or (isinstance(observations, dict) and ACTION_MASK in observations)


def _map(function: Callable[[Tensor], Any], actions: Any) -> Any:
    # Most actions are one tensor, and to find that out by way of a pytree takes longer than the function.
    return function(actions) if isinstance(actions, Tensor) else tree_map(function, actions)


def _stack(observations: list[Any], like: Any) -> Any:
    # An environment's own observations may be of other dtypes (float64, int) than its space and so the batch.
    return tree_map(
        lambda batch, *leaves: np.stack(leaves, dtype=batch.dtype, casting="unsafe"), like, *observations
    )
