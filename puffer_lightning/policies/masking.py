"""Action masks: from what an environment gives to one row of booleans for each environment."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.nesting import leaf_spaces, path_name

ACTION_MASK = "action_mask"
"""Key of the mask in Dict observations, or else in the infos."""


class MaskedObservations(NamedTuple):
    """What a policy is given by environments that mask actions."""

    observations: Any
    """Observations without the mask, leading dimensions first."""
    action_mask: Any
    """Tensor, or array while on its way there, ``[..., num_choices]`` bool, as ``MaskLayout`` lays it out."""


class MaskLayout:
    """How the mask of an action space lies in one row of booleans, True where a value may be chosen.

    Each discrete factor has an entry for each of its values, counted from the first: n for ``Discrete(n)``,
    n₁ + … + n_K for ``MultiDiscrete([n₁, …, n_K])``, and two for each element of a ``MultiBinary``, for 0
    and for 1. Those of Dict and Tuple action spaces follow one another in the order of the space.

    Args:
        action_space: the action space of one environment.

    Raises:
        ConfigurationError: if no part of the space is discrete.
    """

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self._factors = [
            (path_name(path), size)
            for path, leaf in leaf_spaces(action_space).items()
            for size in _factor_sizes(leaf)
        ]
        if not self._factors:
            raise ConfigurationError(
                f"The environment gives an {ACTION_MASK}, but its action space {action_space} has no "
                "discrete part: leave the mask out, or give it another name."
            )
        sizes = np.array([size for _, size in self._factors])
        self.num_choices = int(sizes.sum())
        self._starts = np.cumsum(sizes) - sizes

    def rows(self, mask: Any, num_envs: int, given: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Lay out the masks of N environments.

        Args:
            mask: an array ``[N, ...]`` whose elements, flattened, are in this order; or a tuple of such
                arrays, side by side; or for a Dict action space a mapping from its keys to the mask of each
                part, where a part without one may be anything. An object array ``[N]`` holds the mask of each
                environment by itself. Anything but 0 allows the value.
            num_envs: N.
            given: ``[N]`` bool, False where an environment gave no mask and any action will do; all did if
                None.

        Returns:
            ``[N, num_choices]``.

        Raises:
            ConfigurationError: if the mask does not fit the action space.
        """
        if isinstance(mask, np.ndarray) and mask.dtype == object:
            rows = np.ones((num_envs, self.num_choices), np.bool_)
            for row, of_row in enumerate(mask):
                if of_row is not None:
                    one = np.asarray(of_row) if isinstance(of_row, list) else of_row
                    rows[row] = self._lay_out(self.action_space, tree_map(lambda leaf: leaf[None], one), 1)
        else:
            rows = self._lay_out(self.action_space, mask, num_envs)
        return rows if given is None else rows | ~given[:, None]

    def check(self, rows: NDArray[np.bool_]) -> None:
        """Refuse a mask that leaves nothing to choose.

        Args:
            rows: ``[N, num_choices]``.

        Raises:
            ConfigurationError: if all values of a factor are masked; it names the environment.
        """
        allowed = np.logical_or.reduceat(rows, self._starts, axis=1)
        if not allowed.all():
            row, factor = np.argwhere(~allowed)[0]
            name, size = self._factors[factor]
            of = f" of action {name}" if name else ""
            raise ConfigurationError(
                f"The {ACTION_MASK} of environment {row} masks all {size} choices{of}: let it allow at least "
                "one in every state that is acted in."
            )

    def _lay_out(self, space: gym.Space[Any], mask: Any, num_envs: int) -> NDArray[np.bool_]:
        if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
            # The infos of vector environments say under "_<key>" which environments gave a <key>.
            unknown = mask.keys() - {name for key in space.spaces for name in (key, f"_{key}")}
            if unknown:
                raise ConfigurationError(
                    f"The {ACTION_MASK} has an entry {min(unknown)!r}, but the action space {space} has no "
                    "such part: name the entries as the action space does."
                )
            parts = [
                self._lay_out(part, mask[key], num_envs)
                if key in mask
                else np.ones((num_envs, _num_choices(part)), np.bool_)
                for key, part in space.spaces.items()
            ]
            return np.concatenate(parts, axis=1)
        discrete = (
            [part for part in space.spaces if _num_choices(part)] if isinstance(space, spaces.Tuple) else []
        )
        if isinstance(mask, tuple) and len(discrete) == len(mask):
            parts = [self._lay_out(part, of, num_envs) for part, of in zip(discrete, mask, strict=True)]
            return np.concatenate(parts, axis=1)
        leaves = tree_leaves(mask) if isinstance(mask, tuple) else [mask]
        if any(not isinstance(leaf, np.ndarray) for leaf in leaves):
            raise ConfigurationError(
                f"The {ACTION_MASK} is not made of arrays where the action space has {space}: give it an "
                "array or a tuple of arrays there."
            )
        flat = np.concatenate([leaf.reshape(num_envs, -1) for leaf in leaves], axis=1) != 0
        if flat.shape[1] != _num_choices(space):
            raise ConfigurationError(
                f"The {ACTION_MASK} has {flat.shape[1]} entries for {space}: give it {_num_choices(space)}, "
                "one for each value of each discrete part (for MultiBinary two an element: for 0 and 1)."
            )
        return np.asarray(flat)


def unmasked(observations: Any) -> Any:
    """Return what ``MaskedObservations`` hold, and any other as they are."""
    return observations.observations if isinstance(observations, MaskedObservations) else observations


def without_mask(observations: Any) -> Any:
    """Return Dict observations without their mask, and any other as they are."""
    if isinstance(observations, Mapping) and ACTION_MASK in observations:
        return {key: part for key, part in observations.items() if key != ACTION_MASK}
    return observations


def _factor_sizes(leaf: gym.Space[Any]) -> list[int]:
    if isinstance(leaf, spaces.Discrete):
        return [int(leaf.n)]
    if isinstance(leaf, spaces.MultiDiscrete):
        return [int(size) for size in leaf.nvec.reshape(-1)]
    if isinstance(leaf, spaces.MultiBinary):
        return [2] * math.prod(leaf.shape)
    return []


def _num_choices(space: gym.Space[Any]) -> int:
    return sum(sum(_factor_sizes(leaf)) for leaf in leaf_spaces(space).values())
