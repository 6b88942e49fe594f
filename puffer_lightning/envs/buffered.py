"""Environments that fill preallocated buffers in place, as PufferLib's do."""

import pkgutil
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from puffer_lightning.errors import ConfigurationError

Array = NDArray[Any]

_BUFFERS = ("observations", "rewards", "terminals", "truncations")


class BufferedEnv(Protocol):
    """What PufferLib calls a ``PufferEnv``: A agents whose steps are written to four arrays.

    ``reset`` and ``step`` return these same arrays and a list of infos. An agent whose episode ends starts
    the next one within that step. ``step`` takes actions [A, ...] and keeps its own copy of them.
    """

    single_observation_space: Space[Any]
    single_action_space: Space[Any]
    num_agents: int
    observations: Array
    """[A, ...]"""
    rewards: Array
    """[A] float32"""
    terminals: Array
    """[A] bool"""
    truncations: Array
    """[A] bool"""

    def reset(self, seed: int | None = None) -> tuple[Array, list[Any]]:
        """Start all episodes; returns observations and infos."""

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, list[Any]]:
        """Returns observations, rewards, terminals, truncations and infos."""

    def close(self) -> None:
        """Free what is not Python's."""


class BufferedVectorEnv(VectorEnv[Array, Array, Array]):
    """A :class:`BufferedEnv` as a gymnasium vector environment, an agent a row, without a copy.

    Everything returned is the environment's own memory, which the next step overwrites. It resets in
    SAME_STEP mode, but final observations are lost: a buffer has no room for them. A truncated step therefore
    bootstraps from the value of the observation it was taken at (and a warning says so once), instead of that
    of the one it led to.

    Args:
        env: The environment; its agents are the rows.

    Raises:
        ConfigurationError: A buffer is missing or not as it should be.
    """

    def __init__(self, env: BufferedEnv) -> None:
        name = type(env).__name__
        for buffer in _BUFFERS:
            array = getattr(env, buffer, None)
            if not isinstance(array, np.ndarray) or array.shape[:1] != (env.num_agents,):
                raise ConfigurationError(
                    f"env {name} does not fill buffers in place: let its {buffer} be a NumPy array of "
                    f"num_agents = {env.num_agents} rows."
                )
        self.env = env
        self.num_envs = env.num_agents
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._terminals, self._truncations = (
            _as_flags(buffer, name) for buffer in (env.terminals, env.truncations)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start all episodes.

        Args:
            seed: Given to the environment modulo 2³¹, if it is not None.
            options: None; single rows cannot be reset.

        Returns:
            Observations [A, ...], the buffer itself, and ``{"infos": [...]}`` if the environment returned
            any.
        """
        assert not options, "an environment that resets itself takes no options"
        # Environments in C take the seed as an int of theirs.
        _, infos = self.env.reset() if seed is None else self.env.reset(seed % 2**31)
        return self.env.observations, _as_dict(infos)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play one action for every agent.

        Args:
            actions: [A, ...].

        Returns:
            Observations, rewards, terminated and truncated, the buffers themselves, and
            ``{"infos": [...]}`` if the environment returned any.
        """
        infos = self.env.step(actions)[-1]
        env = self.env
        return env.observations, env.rewards, self._terminals, self._truncations, _as_dict(infos)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()


def make_buffered_env(
    num_envs: int, env: str | Callable[..., BufferedEnv], agents_per_env: int = 1, **env_kwargs: Any
) -> BufferedVectorEnv:
    """Make a :class:`BufferedEnv` and wrap it.

    On the command line: ``--data.env puffer_lightning.envs.buffered.make_buffered_env`` and
    ``--data.env_kwargs.env my_module.MyEnv``.

    Args:
        num_envs: Rows, that is agents.
        env: Its class, or the dotted path of it; takes ``num_envs``.
        agents_per_env: Agents of each environment; the class is told to make ``num_envs / agents_per_env``.
        env_kwargs: Further arguments of the class.

    Raises:
        ConfigurationError: There is no such class, or it makes another number of agents.
    """
    if agents_per_env < 1 or num_envs % agents_per_env:
        raise ConfigurationError(
            f"agents_per_env {agents_per_env} does not divide num_envs {num_envs}, which counts agents: set "
            "num_envs to a multiple of it."
        )
    make = env
    if isinstance(make, str):
        try:
            make = pkgutil.resolve_name(make)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigurationError(
                f"env {env} cannot be imported ({problem}): give the dotted path of a class."
            ) from problem
    made: BufferedEnv = make(num_envs=num_envs // agents_per_env, **env_kwargs)
    if made.num_agents != num_envs:
        raise ConfigurationError(
            f"env {type(made).__name__} made {made.num_agents} agents where num_envs {num_envs} and "
            f"agents_per_env {agents_per_env} say otherwise: set agents_per_env to its agents in each "
            "environment."
        )
    return BufferedVectorEnv(made)


def _as_flags(buffer: Array, name: str) -> NDArray[np.bool_]:
    """The buffer as bool; C environments write bytes of 0 and 1, which are just that."""
    if buffer.dtype.itemsize != 1:
        raise ConfigurationError(
            f"env {name} flags ends of episodes as {buffer.dtype}: make its terminals and truncations bool."
        )
    return buffer.view(np.bool_)


def _as_dict(infos: list[Any]) -> dict[str, Any]:
    return {"infos": infos} if infos else {}
