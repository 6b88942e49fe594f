from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    CategoricalHead,
    GaussianHead,
    LinearHead,
    MultiCategoricalHead,
    SquashedGaussianHead,
    make_head,
)

BOX = spaces.Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("space", "squash", "expected"),
    [
        (spaces.Discrete(3), False, CategoricalHead),
        (spaces.MultiDiscrete([3, 2]), False, MultiCategoricalHead),
        (spaces.MultiBinary(3), False, MultiCategoricalHead),
        (BOX, False, GaussianHead),
        (BOX, True, SquashedGaussianHead),
    ],
)
def test_each_space_gets_its_head(space: gym.Space[Any], squash: bool, expected: type[LinearHead]) -> None:
    head = make_head(8, space, squash)
    assert type(head) is expected
    assert isinstance(head, LinearHead)
    singular_values = torch.linalg.svdvals(head.linear.weight)
    torch.testing.assert_close(singular_values, torch.full_like(singular_values, 0.01))
    assert not head.linear.bias.any()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=4),
        spaces.MultiDiscrete([3, 2, 7]),
        spaces.MultiBinary(4),
        spaces.MultiBinary((2, 3)),
        BOX,
        spaces.Box(0.0, 1.0, (1,), np.float64),
    ],
)
@pytest.mark.parametrize("squash", [False, True])
def test_what_the_environment_is_given_is_in_its_space(space: gym.Space[Any], squash: bool) -> None:
    head = make_head(8, space, squash and isinstance(space, spaces.Box))
    noise = torch.empty(5, 20, head.noise_size)
    head.fill_noise(noise, torch.Generator().manual_seed(0))
    actions, log_probs = head.sample(head(torch.ones(5, 20, 8)), noise)
    stored = head.empty_actions(5, 20)
    assert (actions.shape, actions.dtype) == (stored.shape, stored.dtype)
    assert log_probs.shape == (5, 20)
    for given in head.to_env(actions).flatten(0, 1).numpy():
        assert space.contains(given)


def test_log_std_init_reaches_the_parameter() -> None:
    head = make_head(8, BOX, log_std_init=-1.5)
    assert isinstance(head, GaussianHead)
    assert head.log_std.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(BOX),
        spaces.Graph(BOX, None),
        spaces.OneOf([BOX]),
    ],
)
def test_other_spaces_are_refused_by_name(space: gym.Space[Any]) -> None:
    for nested in (space, spaces.Dict(a=BOX, b=spaces.Tuple([space]))):
        with pytest.raises(ConfigurationError, match=f"^{type(space).__name__} action spaces"):
            make_head(8, nested)


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple([]), spaces.Dict(a=spaces.Tuple([]))])
def test_nothing_to_choose_is_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(ConfigurationError, match="is empty"):
        make_head(8, space)


def test_squashing_discrete_actions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set squash_actions to false"):
        make_head(8, spaces.Discrete(2), squash=True)
