"""Random spaces, nested at will, for hypothesis; and batches of them as a policy sees them."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

Strategy = st.SearchStrategy[gym.Space[Any]]

_SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (2, 1, 3)])
_DISCRETE: Strategy = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.sampled_from([1, 3, (2, 2)])),
)
_FLOATS = st.sampled_from([np.float32, np.float64])
_UNBOUNDED: Strategy = st.builds(
    lambda shape, dtype: spaces.Box(-np.inf, np.inf, shape, dtype), _SHAPES, _FLOATS
)
_BOUNDED: Strategy = st.builds(lambda shape, dtype: spaces.Box(-2.0, 3.0, shape, dtype), _SHAPES, _FLOATS)
_INTEGERS: Strategy = st.builds(
    lambda shape, dtype: spaces.Box(0, 100, shape, dtype),
    _SHAPES,
    st.sampled_from([np.uint8, np.int8, np.int32, np.int64]),
)
_IMAGES: Strategy = st.sampled_from([(8, 9), (3, 8, 8), (12, 8, 3)]).map(
    lambda shape: spaces.Box(0, 255, shape, np.uint8)
)


def nested(leaves: Strategy) -> Strategy:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abcde"), inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=5,
    )


OBSERVATION_SPACES = nested(st.one_of(_DISCRETE, _UNBOUNDED, _BOUNDED, _INTEGERS, _IMAGES))
VECTOR_SPACES = nested(st.one_of(_DISCRETE, _UNBOUNDED, _BOUNDED, _INTEGERS))
ACTION_SPACES = nested(st.one_of(_DISCRETE, _UNBOUNDED, _BOUNDED))
DISCRETE_SPACES = nested(_DISCRETE)


def batch(space: gym.Space[Any], size: int, seed: int = 0) -> Any:
    """``size`` random members of a space, as a pytree of tensors."""
    batched = batch_space(space, size)
    batched.seed(seed)
    return tree_map(torch.from_numpy, batched.sample())


def rows(tree: Any, size: int) -> list[Any]:
    """The members that a batch of tensors holds, as arrays and NumPy scalars."""
    return [tree_map(lambda leaf, row=row: leaf.numpy()[row], tree) for row in range(size)]
