"""What every sanity environment shares: batching, the three autoreset modes, seeding and saved state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from puffer_lightning.envs.arguments import check_arguments, parse_autoreset_mode
from puffer_lightning.errors import ConfigurationError

Array = NDArray[Any]
Rows = NDArray[np.intp]
Outcome = tuple[Array, Array, Array]


class SanityVectorEnv(VectorEnv[Array, Array, Array]):
    """A tiny environment, batched in numpy, that catches one class of PPO bug in seconds on a CPU.

    A subclass says what happens to *some rows* of the batch; this class decides *which* rows, according to
    the autoreset mode (gymnasium >= 1.1):

    - ``NEXT_STEP``: the step after an episode's end starts the next one; its action is ignored, its reward
      is 0 and both flags are False.
    - ``SAME_STEP``: the step that ends an episode also starts the next one; the observation it ended on is
      in ``infos["final_obs"]`` (object array ``[num_envs]``), where ``infos["_final_obs"]`` is True.
    - ``DISABLED``: the caller starts ended rows by ``reset(options={"reset_mask": mask})``; stepping an
      ended row is an ``AssertionError``, as in gymnasium.

    Random numbers are drawn for the rows that move and for no others, so one row alone, or rows whose
    episodes end together, live through the same episodes in all three modes.

    State protocol: ``set_state(get_state())`` on any instance of the same class and ``num_envs`` makes all
    later steps repeat bit for bit, in whatever autoreset mode the state was taken.

    Args:
        num_envs: Rows in the batch, at least 1.
        autoreset_mode: An ``AutoresetMode``, its value (``"NextStep"``) or its name (``"NEXT_STEP"``).
        render_mode: None or one of ``render_modes``.

    Attributes:
        optimal_return: Mean episode return of the best policy without memory.
        random_return: Mean episode return of uniformly random actions.
        solved_at: Mean episode return that a right PPO reaches and one with the bug does not exceed.
        solved_by: Whether ``solved_at`` is about the policy that samples or about its greedy (mode) action.
        row_state: Names of the arrays ``[num_envs, ...]`` that a subclass keeps, for ``get_state``.
        render_modes: Render modes that the class offers.

    Raises:
        ConfigurationError: An argument has a value that cannot work.
    """

    optimal_return: ClassVar[float]
    random_return: ClassVar[float]
    solved_at: ClassVar[float]
    solved_by: ClassVar[Literal["sampling", "greedy"]] = "sampling"
    row_state: ClassVar[tuple[str, ...]] = ()
    render_modes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        num_envs: int = 1,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        check_arguments(type(self).__name__, num_envs, render_mode, self.render_modes)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self.metadata = {
            "render_modes": list(self.render_modes),
            "render_fps": 4,
            "autoreset_mode": self.autoreset_mode,
        }
        self.single_observation_space, self.single_action_space = self._spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._ready = False
        self.elapsed = np.zeros(num_envs, dtype=np.int64)
        self.done = np.zeros(num_envs, dtype=np.bool_)
        self._allocate()

    @abstractmethod
    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Spaces of one row: observation, action."""

    def _allocate(self) -> None:
        """Set the arrays named in ``row_state`` as they are before anything happened."""

    @abstractmethod
    def _start(self, rows: Rows) -> None:
        """Start an episode in each of ``rows`` (indices ``[R]``)."""

    @abstractmethod
    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        """Play ``actions`` ``[R, ...]`` in ``rows`` ``[R]``; ``elapsed`` already counts this step.

        Returns:
            Reward, terminated and truncated, each ``[R]``.
        """

    @abstractmethod
    def _observe(self) -> Array:
        """Observations of all rows ``[num_envs, ...]``, as a new array."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start an episode in every row, or in the rows of ``options["reset_mask"]``.

        Args:
            seed: Seeds the one generator that all rows share; None goes on with it.
            options: ``{"reset_mask": bool [num_envs]}`` leaves the rows where it is False as they are.

        Returns:
            Observations ``[num_envs, ...]`` and an empty info dict.

        Raises:
            ConfigurationError: The mask is not a boolean array ``[num_envs]`` with at least one True.
        """
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self._allocate()
            self._begin(np.arange(self.num_envs))
            self._ready = True
        else:
            self._begin(self._parse_reset_mask(mask))
        return self._observe(), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play one action in every row.

        Args:
            actions: ``[num_envs, ...]``, as in ``action_space``.

        Returns:
            Observations ``[num_envs, ...]``, rewards (float32), terminated, truncated (bool), each
            ``[num_envs]``, and infos.
        """
        assert self._ready, "call reset before step"
        assert actions.shape == self.action_space.shape, f"actions have shape {actions.shape}"
        if self.autoreset_mode is AutoresetMode.DISABLED:
            assert not self.done.any(), f"step on ended rows {np.flatnonzero(self.done)}: reset them first"

        reward = np.zeros(self.num_envs, dtype=np.float32)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        truncated = np.zeros(self.num_envs, dtype=np.bool_)
        live, ended = np.flatnonzero(~self.done), np.flatnonzero(self.done)
        self.elapsed[live] += 1
        reward[live], terminated[live], truncated[live] = self._advance(live, actions[live])
        self._begin(ended)

        self.done = terminated | truncated
        observation = self._observe()
        infos: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self.done.any():
            infos = _final_infos(observation, self.done)
            self._begin(np.flatnonzero(self.done))
            observation = self._observe()
        return observation, reward, terminated, truncated, infos

    def get_state(self) -> dict[str, Any]:
        """Everything that later steps depend on.

        Returns:
            Copies of the row arrays by name, and under ``"generator"`` the bit generator's state.
        """
        state: dict[str, Any] = {name: getattr(self, name).copy() for name in self._state_names}
        state["generator"] = self.np_random.bit_generator.state
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up a state from ``get_state``, without a reset.

        Args:
            state: As returned by ``get_state`` on the same class with the same ``num_envs``.

        Raises:
            ConfigurationError: The state is of another class or another ``num_envs``.
        """
        if set(state) != {*self._state_names, "generator"}:
            raise ConfigurationError(
                f"The saved state is not of {type(self).__name__}; resume with the environment it is from."
            )
        if len(state["elapsed"]) != self.num_envs:
            raise ConfigurationError(
                f"The saved state has {len(state['elapsed'])} rows; set num_envs={len(state['elapsed'])}."
            )
        for name in self._state_names:
            setattr(self, name, state[name].copy())
        self.np_random.bit_generator.state = state["generator"]
        self._ready = True

    @property
    def _state_names(self) -> tuple[str, ...]:
        return ("elapsed", "done", *self.row_state)

    def _begin(self, rows: Rows) -> None:
        self.elapsed[rows] = 0
        self.done[rows] = False
        self._start(rows)

    def _parse_reset_mask(self, mask: object) -> Rows:
        if (
            not isinstance(mask, np.ndarray)
            or mask.dtype != np.bool_
            or mask.shape != (self.num_envs,)
            or not mask.any()
        ):
            raise ConfigurationError(
                "options['reset_mask'] does not select rows; "
                f"pass a numpy bool array of shape ({self.num_envs},) with at least one True."
            )
        assert self._ready, "call reset without a mask first"
        return np.flatnonzero(mask)


def _final_infos(observation: Array, done: NDArray[np.bool_]) -> dict[str, Any]:
    """Infos of SAME_STEP as gymnasium's SyncVectorEnv gives them; None where no episode ended."""
    final_obs = np.full(len(done), None, dtype=object)
    rows = np.flatnonzero(done)
    # An assignment from a list of equal arrays would broadcast them; one object a row is what is wanted.
    final_obs[rows] = np.frompyfunc(observation.__getitem__, 1, 1)(rows)
    return {"final_obs": final_obs, "_final_obs": done.copy(), "final_info": {}, "_final_info": done.copy()}
