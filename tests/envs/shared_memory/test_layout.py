import multiprocessing
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from puffer_lightning.envs.shared_memory.layout import SharedBatch, tree_leaves, tree_map, writer

DTYPES = [np.float16, np.float32, np.float64, np.uint8, np.int16, np.int64, np.bool_]
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)

boxes = st.builds(lambda shape, dtype: spaces.Box(0, 1, shape, dtype), SHAPES, st.sampled_from(DTYPES))
leaves = st.one_of(
    boxes,
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(spaces.MultiDiscrete),
    st.integers(1, 4).map(spaces.MultiBinary),
)
nested = st.recursive(
    leaves,
    lambda part: st.one_of(
        st.lists(part, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abcd"), part, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)
FORK = multiprocessing.get_context("fork")


@given(nested, leaves, st.integers(1, 5), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_space_makes_the_round_trip(
    observation_space: Space[Any], action_space: Space[Any], num_envs: int, seed: int
) -> None:
    arguments = (observation_space, action_space, num_envs, 2)
    memory = SharedBatch.allocate(FORK, *arguments)
    here, there = SharedBatch(memory, *arguments), SharedBatch(memory, *arguments)
    for array in (*tree_leaves(here.actions), here.rewards, here.commands, here.replies, here.terminated):
        array[:] = 1  # what overlaps would show
    observation_space.seed(seed)
    samples = [observation_space.sample() for _ in range(num_envs)]
    for tree in (here.observations, here.final_observations):
        write = writer(tree)
        for row, sample in enumerate(samples):
            write(row, sample)
    expected = concatenate(observation_space, samples, create_empty_array(observation_space, num_envs))
    for tree in (there.observations, there.final_observations):
        tree_map(np.testing.assert_array_equal, tree, expected)
        assert [leaf.dtype for leaf in tree_leaves(tree)] == [leaf.dtype for leaf in tree_leaves(expected)]
    for array in (
        *tree_leaves(there.actions),
        there.rewards,
        there.commands,
        there.replies,
        there.terminated,
    ):
        assert (array == 1).all()
    assert not there.truncated.any()


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros((1, 2)), 0.0, np.zeros(1)])
def test_observations_are_not_broadcast(value: Any) -> None:
    array = np.ones((2, 2))
    with pytest.raises(ValueError, match="shape"):
        writer(array)(0, value)
    assert (array == 1).all()


def test_observations_are_not_cast_to_another_kind_of_number() -> None:
    array = np.ones((2, 2), np.int64)
    with pytest.raises(TypeError, match="same_kind"):
        writer(array)(0, np.zeros(2, np.float32))
    writer(array)(0, [3, 4])
    assert array.tolist() == [[3, 4], [1, 1]]
