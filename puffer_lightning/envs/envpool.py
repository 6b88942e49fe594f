"""EnvPool: environments in C++, stepped by its threads."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import envpool
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch.utils._pytree import tree_map
from typing_extensions import override

from puffer_lightning.envs.async_batches import Received
from puffer_lightning.envs.threads import default_threads
from puffer_lightning.errors import ConfigurationError

Array = NDArray[Any]
Flags = NDArray[np.bool_]

_LARGEST_SEED = 2**31 - 1
_OURS = {"seed": "seed_everything", "env_seed": "seed_everything", "num_envs": "data.num_envs"}


class EnvPool(VectorEnv[Any, Array, Array]):
    """Environments of EnvPool, all at once or the first that are ready.

    With ``batch_size`` less than ``num_envs``, ``recv`` returns the first environments that are ready, see
    :class:`~puffer_lightning.envs.async_batches.SupportsSendRecv`; ``step`` still steps all of them. They
    reset in NEXT_STEP mode.

    Source: Weng et al. 2022 (arXiv:2206.10558).

    Args:
        num_envs: N.
        task_id: EnvPool's name of the environment: ``"CartPole-v1"``, ``"Pong-v5"``, ...
        batch_size: Environments that ``recv`` returns; all, if not given.
        num_threads: Threads that step them; this rank's share of the machine's processors, if 0.
        render_mode: ``"rgb_array"`` for frames from ``render()``.
        options: EnvPool's own, such as ``max_episode_steps``, and those of the environment.

    Raises:
        ConfigurationError: There is no such environment or option, or the batches do not fit.
    """

    def __init__(
        self,
        num_envs: int,
        task_id: str,
        *,
        batch_size: int | None = None,
        num_threads: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.batch_size = num_envs if batch_size is None else batch_size
        # Else the last ones would wait for company forever.
        if self.batch_size < 1 or num_envs % self.batch_size:
            raise ConfigurationError(
                f"batch_size {batch_size} does not divide num_envs {num_envs}: set it to a number that does."
            )
        spec = _spec(task_id, options)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._make = partial(
            envpool.make_gymnasium,
            task_id,
            num_envs=num_envs,
            batch_size=self.batch_size,
            num_threads=num_threads or default_threads(num_envs),
            render_mode=render_mode,
            **options,
        )
        self._pool: Any = None
        self._pending = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes; what was sent and not yet received is dropped.

        Args:
            seed: Environment i is given ``seed + i``. EnvPool takes seeds when environments are made, so
                that with one they are all made anew.
            options: None; single environments cannot be reset.

        Returns:
            Observations [N, ...] and infos.
        """
        assert not options, "an environment that resets itself takes no options"
        while self._pending:
            self.recv()
        if self._pool is None or seed is not None:
            self.close_extras()
            chosen = int(self.np_random.integers(_LARGEST_SEED)) if seed is None else seed
            self._pool = self._make(seed=chosen % (_LARGEST_SEED - self.num_envs))
        self._pool.async_reset()
        self._pending = self.num_envs
        received = self._receive_all()
        return received.observations, received.infos

    @override
    def step(self, actions: Array) -> tuple[Any, Array, Flags, Flags, dict[str, Any]]:
        """Step all environments.

        Args:
            actions: [N, ...].

        Returns:
            Observations [N, ...], rewards [N], terminated [N], truncated [N] and infos.
        """
        self.send(actions, np.arange(self.num_envs))
        received = self._receive_all()
        return received[1:]

    def send(self, actions: Array, env_ids: Array | Sequence[int]) -> None:
        """Let environments step; ``recv`` returns what became of it.

        Args:
            actions: [B, ...], in the order of ``env_ids``.
            env_ids: [B], which environments.
        """
        self._pool.send(actions, np.asarray(env_ids))
        self._pending += len(env_ids)

    def recv(self) -> Received:
        """Wait for the first ``batch_size`` environments that have stepped."""
        observations, rewards, terminated, truncated, infos = self._pool.recv()
        self._pending -= self.batch_size
        return Received(infos["env_id"], observations, rewards, terminated, truncated, infos)

    def _receive_all(self) -> Received:
        """All environments, in order."""
        batches = [self.recv() for _ in range(self.num_envs // self.batch_size)]
        if len(batches) == 1:
            return batches[0]
        order = np.argsort(np.concatenate([batch.env_ids for batch in batches]))
        together: Received = tree_map(lambda *leaves: np.concatenate(leaves)[order], *batches)
        return together

    @override
    def render(self) -> tuple[Array, ...] | None:
        """A frame of each environment; None without ``render_mode``."""
        return None if self.render_mode is None else tuple(self._pool.render(np.arange(self.num_envs)))

    @override
    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def find(task_id: str) -> Callable[..., EnvPool]:
    """What makes an environment of EnvPool when told how many.

    Raises:
        ConfigurationError: There is no such environment; the message suggests the closest.
    """
    known = envpool.list_all_envs()
    if task_id not in known:
        closest = difflib.get_close_matches(task_id, known, n=3)
        hint = f"did you mean {' or '.join(closest)}?" if closest else "see envpool.list_all_envs()."
        raise ConfigurationError(f"env envpool:{task_id} is not one of EnvPool's: {hint}")
    return partial(EnvPool, task_id=task_id)


def _spec(task_id: str, options: dict[str, Any]) -> Any:
    """EnvPool's description of an environment with options that it knows."""
    for name in options.keys() & _OURS.keys():
        raise ConfigurationError(f"env_kwargs.{name} is not EnvPool's to set here: use {_OURS[name]}.")
    try:
        unknown = sorted(options.keys() - set(envpool.make_spec(task_id).config._fields))
        if unknown:
            raise ConfigurationError(
                f"env_kwargs {', '.join(unknown)} do not fit env envpool:{task_id}: see "
                f'envpool.make_spec("{task_id}").config for those that do.'
            )
        return envpool.make_spec(task_id, **options)
    except (ImportError, RuntimeError, TypeError, ValueError) as problem:
        raise ConfigurationError(f"env envpool:{task_id} cannot be made: {problem}") from problem
