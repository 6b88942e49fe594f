from typing import Any

import gymnasium as gym
from gymnasium import spaces
from hypothesis import given, settings

from puffer_lightning.policies.nesting import fill, leaf_spaces, path_name, select, template
from tests.policies.nested_spaces import OBSERVATION_SPACES

UNIT = spaces.Box(-1.0, 1.0, (2,))


def test_leaves_are_found_by_path_in_the_order_of_the_space() -> None:
    space = spaces.Dict(b=spaces.Tuple([UNIT, spaces.Dict(c=spaces.Discrete(2))]), a=spaces.MultiBinary(3))
    assert list(leaf_spaces(space).items()) == [
        (("b", 0), UNIT),
        (("b", 1, "c"), spaces.Discrete(2)),
        (("a",), spaces.MultiBinary(3)),
    ]
    assert leaf_spaces(UNIT) == {(): UNIT}
    assert path_name(("b", 1, "c")) == "b/1/c"


@given(OBSERVATION_SPACES)
@settings(max_examples=50, deadline=None)
def test_a_sample_taken_apart_and_put_together_is_the_same(space: gym.Space[Any]) -> None:
    sample = space.sample()
    together = fill(template(space), [select(sample, path) for path in leaf_spaces(space)])
    assert space.contains(together)
    for path in leaf_spaces(space):
        assert select(together, path) is select(sample, path)
