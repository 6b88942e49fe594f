"""What a worker does to its environments, with nothing said of processes."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from puffer_lightning.envs.shared_memory.faults import WorkerError
from puffer_lightning.envs.shared_memory.layout import SharedBatch, tree_leaves, tree_map, writer
from puffer_lightning.envs.state import NoStateError, get_env_state, set_env_state


class RowInfo(NamedTuple):
    """What an environment said besides numbers.

    Attributes:
        row: Index of the environment.
        info: Of its step, or of its reset if that came after it.
        final_info: Of the step that ended its episode (SAME_STEP).
    """

    row: int
    info: dict[str, Any]
    final_info: dict[str, Any]


class Outcome(NamedTuple):
    """What there is to say about a step or reset beyond the shared arrays.

    Attributes:
        infos: Of the environments that gave any, by row.
        masked: Row and reason of each transition that was not finite and is none.
    """

    infos: list[RowInfo]
    masked: list[tuple[int, str]]


class Slice:
    """Environments first_row, first_row + 1, … of a batch, stepped one after the other.

    Args:
        envs: The environments.
        first_row: Index of the first.
        batch: Where actions are read and everything else is written.
        action_space: Of the whole batch.
        autoreset_mode: What to do when an episode ends.
        mask_non_finite: End an episode that turned NaN or infinite, rather than raise.
        on_row: Told the row of each environment before it is stepped or reset.
        restarts: Seeds of each environment's first episode, if the environments stand in for lost ones: their
            episodes then begin as autoreset episodes do.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        first_row: int,
        batch: SharedBatch,
        action_space: Space[Any],
        autoreset_mode: AutoresetMode,
        *,
        mask_non_finite: bool = False,
        on_row: Callable[[int], object] = lambda row: None,
        restarts: Sequence[int] | None = None,
    ) -> None:
        self.envs = envs
        self.rows = range(first_row, first_row + len(envs))
        self._batch = batch
        self._actions = tree_map(lambda leaf: leaf[self._slice], batch.actions)
        self._action_space = action_space
        self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = autoreset_mode is AutoresetMode.NEXT_STEP
        self._mask_non_finite = mask_non_finite
        self._on_row = on_row
        self._write_observation = writer(batch.observations)
        self._write_final = writer(batch.final_observations)
        self._floats = [leaf for leaf in tree_leaves(batch.observations) if leaf.dtype.kind == "f"]
        self._final_floats = [
            leaf for leaf in tree_leaves(batch.final_observations) if leaf.dtype.kind == "f"
        ]
        self._seeds: list[int | None] = [None] * len(envs) if restarts is None else list(restarts)
        self._ended = [restarts is not None] * len(envs)

    @property
    def _slice(self) -> slice:
        return slice(self.rows.start, self.rows.stop)

    def restart(self) -> Outcome:
        """Begin the episodes that stand in for lost ones, in the mode in which the step itself does so."""
        return self.reset(self._seeds) if self._same_step else Outcome([], [])

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> Outcome:
        """Reset the environments, or those set in ``mask``."""
        infos = []
        for index, row in enumerate(self.rows):
            if mask is None or mask[index]:
                info = self._reset(index, row, seeds[index], options)
                if info:
                    infos.append(RowInfo(row, info, {}))
        self._refuse_non_finite_resets()
        return Outcome(infos, [])

    def get_states(self) -> list[dict[str, Any] | str]:
        """The state of each environment, or why it offers none."""
        states: list[dict[str, Any] | str] = []
        for env, ended in zip(self.envs, self._ended, strict=True):
            try:
                states.append({"layers": get_env_state(env), "ended": ended})
            except NoStateError as reason:
                states.append(str(reason))
        return states

    def set_states(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Take up what ``get_states`` returned; why some environments cannot, if so."""
        reasons = []
        for index, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self._ended[index] = state["ended"]
            try:
                set_env_state(env, state["layers"])
            except NoStateError as reason:
                reasons.append(str(reason))
        return reasons

    def step(self) -> Outcome | None:
        """Step the environments; ``None`` if there is nothing to say beyond the shared arrays."""
        batch, ended, infos = self._batch, self._ended, []
        rewards, terminated, truncated = batch.rewards, batch.terminated, batch.truncated
        same_step, next_step = self._same_step, self._next_step
        write, on_row, any_ended = self._write_observation, self._on_row, False
        # Copied, as an environment may keep its action.
        actions = iterate(self._action_space, tree_map(np.copy, self._actions))
        for index, (row, env, action) in enumerate(zip(self.rows, self.envs, actions, strict=True)):
            on_row(row)
            final_info: dict[str, Any] = {}
            if ended[index] and next_step:
                rewards[row], terminated[row], truncated[row] = 0.0, False, False
                info = self._reset(index, row, None)
            else:
                if ended[index]:
                    raise WorkerError(
                        row, "its episode is over: reset it with the option reset_mask", fatal=True
                    )
                try:
                    observation, rewards[row], over, out_of_time, info = env.step(action)
                    terminated[row], truncated[row] = over, out_of_time
                    if over or out_of_time:
                        any_ended = True
                        if same_step:
                            self._write_final(row, observation)
                        else:
                            ended[index] = True
                            write(row, observation)
                    else:
                        write(row, observation)
                except Exception as error:
                    raise _describe(row, error) from error
                if same_step and (over or out_of_time):
                    final_info, info = info, self._reset(index, row, None)
            if info or final_info:
                infos.append(RowInfo(row, info, final_info))
        masked = [] if self._finite(any_ended) else self._mask(infos)
        return Outcome(infos, masked) if infos or masked else None

    def _reset(
        self, index: int, row: int, seed: int | None, options: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self._on_row(row)
        if seed is None:
            seed = self._seeds[index]
        self._seeds[index], self._ended[index] = None, False
        try:
            observation, info = self.envs[index].reset(seed=seed, options=options)
            self._write_observation(row, observation)
        except Exception as error:
            raise _describe(row, error) from error
        return info

    def _finite(self, any_ended: bool) -> bool:
        rows = self._slice
        leaves = [*self._floats, self._batch.rewards]
        if any_ended and self._same_step:
            leaves += self._final_floats
        return all(bool(np.isfinite(leaf[rows]).all()) for leaf in leaves)

    def _mask(self, infos: list[RowInfo]) -> list[tuple[int, str]]:
        """Make truncated episodes with nothing to learn of what is not finite."""
        batch, masked = self._batch, []
        for index, row in enumerate(self.rows):
            over = batch.terminated[row] or batch.truncated[row]
            seen = [*self._floats, *(self._final_floats if over and self._same_step else ())]
            what = "observation" if not _all_finite(seen, row) else "reward"
            if what == "reward" and np.isfinite(batch.rewards[row]):
                continue
            reason = f"its {what} is NaN or infinite"
            if not self._mask_non_finite:
                raise WorkerError(row, f"{reason}: correct it, or set on_non_finite to mask", fatal=True)
            masked.append((row, reason))
            batch.rewards[row], batch.terminated[row], batch.truncated[row] = 0.0, False, True
            if self._same_step and not over:
                for final, current in zip(
                    tree_leaves(batch.final_observations), tree_leaves(batch.observations), strict=True
                ):
                    final[row] = current[row]
                info = self._reset(index, row, None)
                infos[:] = [given for given in infos if given.row != row]
                infos.append(RowInfo(row, info, {}))
            elif not self._same_step:
                self._ended[index] = True
            for leaf in self._final_floats if self._same_step else self._floats:
                leaf[row] = np.nan_to_num(leaf[row], posinf=0.0, neginf=0.0)
        if self._same_step:
            self._refuse_non_finite_resets()
        infos.sort(key=lambda given: given.row)
        return masked

    def _refuse_non_finite_resets(self) -> None:
        for row in self.rows:
            if not _all_finite(self._floats, row):
                raise WorkerError(row, "its first observation after a reset is NaN or infinite", fatal=True)


def _all_finite(leaves: Sequence[NDArray[Any]], row: int) -> bool:
    return all(bool(np.isfinite(leaf[row]).all()) for leaf in leaves)


def _describe(row: int, error: Exception) -> WorkerError:
    return WorkerError(row, f"{type(error).__name__}: {error}", traceback.format_exc())
