"""Stepping some of the environments of a vector environment while others step."""

import inspect
from typing import Any, Literal, cast

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.envs.async_batches import SupportsSendRecv
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import MaskedObservations, without_mask
from puffer_lightning.rollout.stepper import Flags, Step, Stepper

Overlap = Literal["halves", "first_ready"]
"""``"halves"`` take turns; of ``"first_ready"`` environments, those act first that are ready first."""


def check_overlap(env: VectorEnv[Any, Any, Any], overlap: Overlap) -> None:
    """Refuse environments that cannot be stepped in parts.

    Args:
        env: N environments.
        overlap: How they are to be stepped.

    Raises:
        ConfigurationError: The message says what is missing.
    """
    name, num_envs = type(env).__name__, env.num_envs
    if not _takes_env_ids(env, "send"):
        raise ConfigurationError(
            f"overlap is {overlap}, but {name} steps all of its environments at once: leave overlap out, or "
            "let worker processes step them (num_workers), if gymnasium has not vectorised them."
        )
    if overlap == "halves":
        if not _takes_env_ids(env, "recv"):
            raise ConfigurationError(
                f"overlap is halves, but {name} cannot wait for particular environments: set it to "
                "first_ready."
            )
        if num_envs % 2:
            raise ConfigurationError(
                f"overlap is halves with num_envs={num_envs}: set num_envs to an even number."
            )
        return
    batch_size = cast(SupportsSendRecv, env).batch_size
    if batch_size >= num_envs or num_envs % batch_size:
        raise ConfigurationError(
            f"overlap is first_ready, but {name} hands over batch_size={batch_size} of its "
            f"num_envs={num_envs} environments at a time: let batch_size divide num_envs, and be less."
        )


def _takes_env_ids(env: VectorEnv[Any, Any, Any], name: str) -> bool:
    method = getattr(env, name, None)
    return method is not None and "env_ids" in inspect.signature(method).parameters


class BatchStepper(Stepper):
    """As ``Stepper``, of environments that are sent actions and received in batches.

    ``observations`` are memory of its own, of which each batch replaces its rows. Those of environments that
    are stepping mean nothing.

    Args:
        env: The environment, which has passed :func:`check_overlap`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._batches = cast(SupportsSendRecv, env)
        self._rows: NDArray[np.intp] = np.arange(env.num_envs)

    def begin(self, observations: Any, infos: dict[str, Any]) -> None:
        """Take up what a reset of all environments returned.

        Raises:
            ConfigurationError: The observations are tensors.
        """
        if isinstance(tree_leaves(observations)[0], Tensor):
            raise ConfigurationError(
                f"the observations of {type(self.env).__name__} are tensors, whose environments step all at "
                "once: leave overlap out."
            )
        super().begin(observations, infos)

    def send(self, actions: Any, env_ids: NDArray[np.intp]) -> None:
        """Let environments step.

        Args:
            actions: Pytree of arrays [B, ...], in the order of ``env_ids``, as of ``to_env``.
            env_ids: [B], which ones.
        """
        self._batches.send(actions, env_ids)

    def receive(self, env_ids: NDArray[np.intp] | None = None) -> tuple[NDArray[np.intp], Step]:
        """Wait for environments that were sent actions.

        Args:
            env_ids: Which ones; those that are ready first, if not given.

        Returns:
            Which ones they are, [B], and what they did.

        Raises:
            ConfigurationError: An action mask does not fit the action space or leaves nothing to choose.
        """
        received = self._batches.recv() if env_ids is None else self._batches.recv(env_ids)
        self._rows = received.env_ids
        self._all_valid = np.ones(len(self._rows), dtype=np.bool_)
        return self._rows, self._take(*received[1:])

    def _exchange_ended(self, ended: Flags) -> Flags:
        before = self._ended[self._rows]
        self._ended[self._rows] = ended
        return before

    def _reset_ended(self, ended: Flags) -> tuple[Any, Flags | None]:
        of_all = np.zeros(self.env.num_envs, dtype=np.bool_)
        of_all[self._rows] = ended
        observations, mask = super()._reset_ended(of_all)
        rows = self._rows
        return tree_map(lambda leaf: leaf[rows], observations), None if mask is None else mask[rows]

    def _see(self, observations: Any, mask: Flags | None) -> None:
        seen = observations if mask is None else MaskedObservations(without_mask(observations), mask)
        if self.observations is None:
            self.observations = tree_map(np.array, seen)
        for rows, leaf in zip(tree_leaves(self.observations), tree_leaves(seen), strict=True):
            rows[self._rows] = leaf
        if mask is not None:
            assert self._mask_layout is not None
            # Of all environments, so that the index in the message is that of the environment.
            self._mask_layout.check(self.observations.action_mask)
