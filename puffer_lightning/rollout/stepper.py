"""One way to step a vector environment, whichever of gymnasium's autoreset modes it has."""

from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from puffer_lightning.errors import ConfigurationError

Flags = NDArray[np.bool_]
_NO_ROWS: NDArray[np.intp] = np.zeros(0, dtype=np.intp)


class Step(NamedTuple):
    """What one step of N environments returned.

    Attributes:
        rewards: [N].
        terminated: [N] bool.
        truncated: [N] bool.
        valid: [N] bool, False where this step only reset the environment (NEXT_STEP) and ignored its action.
        started: [N] bool, the next observation is the first of an episode.
        final_observations: Rows of final observations, [K, ...] for the K environments set in
            ``final_rows``; ``None`` where none is needed or the next observation is the final one itself.
        final_rows: [K] int, environments whose episode was truncated at this step and whose final
            observation is no longer to be seen in ``Stepper.observations``.
    """

    rewards: NDArray[Any]
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

    Raises:
        ConfigurationError: The environment does not say how it resets.
    """

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
        self._ended: Flags = np.zeros(env.num_envs, dtype=np.bool_)
        self._all_valid: Flags = np.ones(env.num_envs, dtype=np.bool_)
        self.observations: Any = None

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every environment.

        Args:
            seed: Given to the vector environment; gymnasium's own give environment i the seed ``seed + i``.
        """
        self.observations, _ = self.env.reset(seed=seed)
        self._ended = np.zeros(self.env.num_envs, dtype=np.bool_)

    def step(self, actions: Any) -> Step:
        """Step every environment once.

        Args:
            actions: A batch of the environment's ``action_space``.
        """
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            started, self._ended = self._ended, ended
            self.observations = observations
            return Step(rewards, terminated, truncated, valid=~started, started=started)
        if not ended.any():
            self.observations = observations
            return Step(rewards, terminated, truncated, self._all_valid, started=ended)
        rows = np.flatnonzero(truncated & ~terminated)
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            final = _stack([infos["final_obs"][row] for row in rows], observations) if rows.size else None
        else:
            # Copied before the reset, which may reuse the memory.
            final = tree_map(lambda leaf: np.array(leaf[rows]), observations) if rows.size else None
            observations, _ = self.env.reset(options={"reset_mask": ended})
        self.observations = observations
        return Step(rewards, terminated, truncated, self._all_valid, ended, final, rows)


def _stack(observations: list[Any], like: Any) -> Any:
    # An environment's own observations may be of other dtypes (float64, int) than its space and so the batch.
    return tree_map(
        lambda batch, *leaves: np.stack(leaves, dtype=batch.dtype, casting="unsafe"), like, *observations
    )
