from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    MaskedObservations,
    MaskLayout,
    Policy,
    make_head,
    make_policy,
    without_mask,
)
from puffer_lightning.policies.nesting import leaf_spaces, select
from tests.policies.nested_spaces import DISCRETE_SPACES, rows

BOX = spaces.Box(-1.0, 1.0, (2,))
HYBRID = spaces.Dict(
    move=spaces.Discrete(3), aim=BOX, keys=spaces.MultiBinary(2), gear=spaces.MultiDiscrete([2, 3])
)


def array(*values: Any) -> Any:
    return np.array(values, dtype=np.int8)


def random_mask(space: gym.Space[Any], size: int, seed: int) -> Any:
    """Random rows of a layout that leave at least one value of each factor."""
    layout, random = MaskLayout(space), np.random.default_rng(seed)
    mask = random.random((size, layout.num_choices)) < 0.5
    while True:
        try:
            layout.check(mask)
            return mask
        except ConfigurationError:
            mask |= random.random(mask.shape) < 0.2


def allowed(space: gym.Space[Any], mask: Any, action: Any) -> bool:
    """Whether one mask, in the order of the layout, allows one action; written without the layout."""
    at = 0
    for path, leaf in leaf_spaces(space).items():
        chosen = np.asarray(select(action, path)).reshape(-1)
        if isinstance(leaf, spaces.Discrete):
            sizes, first = [int(leaf.n)], [int(leaf.start)]
        elif isinstance(leaf, spaces.MultiDiscrete):
            sizes, first = leaf.nvec.reshape(-1).tolist(), leaf.start.reshape(-1).tolist()
        else:
            sizes, first = [2] * len(chosen), [0] * len(chosen)
        for value, size, start in zip(chosen, sizes, first, strict=True):
            if not mask[at + value - start]:
                return False
            at += size
    assert at == len(mask)
    return True


@given(DISCRETE_SPACES, st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_masked_actions_are_never_taken_and_have_probability_zero(space: gym.Space[Any], seed: int) -> None:
    size = 40
    torch.manual_seed(seed)
    head = make_head(8, space)
    mask = random_mask(space, size, seed)
    # Logits far apart: a mask that is merely added would lose.
    params = head.mask(50 * torch.randn(size, head.num_params), torch.from_numpy(mask))
    noise = torch.empty(size, head.noise_size)
    head.fill_noise(noise, torch.Generator().manual_seed(seed))
    sampled, log_probs = head.sample(params, noise)
    assert log_probs.isfinite().all()
    assert torch.equal(log_probs, head.evaluate(params, sampled)[0])
    assert head.evaluate(params, sampled)[1].isfinite().all()
    for actions in (sampled, head.mode(params)):
        for row, action in enumerate(rows(head.to_env(actions), size)):
            assert allowed(space, mask[row], action)
    for row, action in enumerate(rows(head.to_env(_anything(space, head, size, seed)), size)):
        probability = head.evaluate(params, _anything(space, head, size, seed))[0].exp()[row]
        assert (probability > 0) <= allowed(space, mask[row], action)
        if not allowed(space, mask[row], action):
            assert probability == 0


def _anything(space: gym.Space[Any], head: Any, size: int, seed: int) -> Any:
    noise = torch.empty(size, head.noise_size)
    head.fill_noise(noise, torch.Generator().manual_seed(seed + 1))
    return head.sample(torch.zeros(size, head.num_params), noise)[0]


def test_probabilities_of_what_is_allowed_are_renormalised() -> None:
    head = make_head(8, spaces.Discrete(3))
    params = torch.tensor([[1.0, 2.0, 3.0]])
    masked = head.mask(params, torch.tensor([[True, False, True]]))
    log_probs = torch.stack([head.evaluate(masked, torch.tensor([action]))[0] for action in range(3)])
    expected = torch.tensor([[1.0, -torch.inf, 3.0]]).log_softmax(-1)[0]
    torch.testing.assert_close(log_probs.exp().flatten(), expected.exp())
    entropy = -(expected[[0, 2]].exp() * expected[[0, 2]]).sum()
    torch.testing.assert_close(head.evaluate(masked, torch.tensor([0]))[1][0], entropy)


def test_no_gradient_reaches_the_logits_of_masked_actions() -> None:
    head = make_head(8, spaces.MultiDiscrete([2, 3]))
    params = torch.randn(1, head.num_params, requires_grad=True)
    mask = torch.tensor([[True, True, False, True, True]])
    log_probs, entropies = head.evaluate(head.mask(params, mask), torch.tensor([[0, 2]]))
    (log_probs + entropies).sum().backward()
    assert params.grad is not None
    assert (params.grad.reshape(2, 3) != 0).tolist() == [[True, True, False], [False, True, True]]


def test_half_precision_logits_can_be_masked() -> None:
    head = make_head(8, spaces.Discrete(3))
    masked = head.mask(torch.zeros(1, 3, dtype=torch.float16), torch.tensor([[True, False, True]]))
    assert head.evaluate(masked, torch.tensor([1]))[0].exp() == 0


class TestLayout:
    @pytest.mark.parametrize(
        ("space", "mask", "expected"),
        [
            (spaces.Discrete(3), array([1, 0, 1]), [1, 0, 1]),
            (spaces.MultiDiscrete([2, 3]), array([1, 0, 0, 1, 1]), [1, 0, 0, 1, 1]),
            (spaces.MultiDiscrete([2, 3]), (array([1, 0]), array([0, 1, 1])), [1, 0, 0, 1, 1]),
            (spaces.MultiDiscrete([[2], [3]]), ((array([1, 0]),), (array([0, 1, 1]),)), [1, 0, 0, 1, 1]),
            (spaces.MultiBinary(2), array([[1, 0], [0, 1]]), [1, 0, 0, 1]),
            (spaces.Tuple([BOX, spaces.Discrete(2)]), array([0, 1]), [0, 1]),
            (spaces.Tuple([BOX, spaces.Discrete(2)]), (array([0, 1]),), [0, 1]),
            (
                spaces.Tuple([spaces.Dict(a=spaces.Discrete(2)), spaces.Discrete(2)]),
                ({"a": array([0, 1])}, array([1, 0])),
                [0, 1, 1, 0],
            ),
            # In the order of the space, not in that of the mask.
            (
                HYBRID,
                {"gear": array([1, 0, 0, 0, 1]), "keys": array([[1, 1], [0, 1]]), "move": array([1, 0, 0])},
                [1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1],
            ),
            (HYBRID, {"keys": array([[1, 0], [1, 1]])}, [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]),
        ],
    )
    def test_all_the_ways_to_give_a_mask(self, space: gym.Space[Any], mask: Any, expected: list[int]) -> None:
        def stacked(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: stacked(part) for key, part in tree.items()}
            if isinstance(tree, tuple):
                return tuple(stacked(part) for part in tree)
            return np.stack([tree, np.ones_like(tree)])

        layout = MaskLayout(space)
        assert layout.rows(stacked(mask), 2).tolist() == [
            [bool(entry) for entry in expected],
            [True] * len(expected),
        ]
        one_each = np.full(2, None, dtype=object)
        one_each[1] = mask
        assert layout.rows(one_each, 2)[1].tolist() == [bool(entry) for entry in expected]
        assert layout.rows(one_each, 2)[0].all()

    def test_environments_that_gave_none_may_do_anything(self) -> None:
        mask = array([1, 0], [0, 0])
        assert MaskLayout(spaces.Discrete(2)).rows(mask, 2, np.array([True, False])).tolist() == [
            [True, False],
            [True, True],
        ]

    def test_companions_in_infos_are_not_parts(self) -> None:
        space = spaces.Dict(a=spaces.Discrete(2))
        mask = {"a": array([1, 0]), "_a": np.array([True])}
        assert MaskLayout(space).rows(mask, 1).tolist() == [[True, False]]

    @pytest.mark.parametrize(
        ("space", "mask", "message"),
        [
            (spaces.Discrete(3), array([1, 0]), r"has 2 entries for Discrete\(3\): give it 3"),
            (spaces.MultiBinary(2), array([1, 0]), "give it 4"),
            (spaces.Dict(a=spaces.Discrete(2)), {"b": array([1, 0])}, "has an entry 'b'"),
            (spaces.Discrete(2), {"a": array([1, 0])}, "not made of arrays"),
        ],
    )
    def test_masks_that_do_not_fit_are_refused(self, space: gym.Space[Any], mask: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            MaskLayout(space).rows(mask, 1)

    def test_a_space_without_choices_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="no discrete part"):
            MaskLayout(BOX)

    @pytest.mark.parametrize(
        ("space", "row", "message"),
        [
            (spaces.Discrete(2), [0, 0], "environment 2 masks all 2 choices:"),
            (
                HYBRID,
                [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
                "environment 2 masks all 3 .* move:",
            ),
            (
                HYBRID,
                [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
                "environment 2 masks all 3 .* gear:",
            ),
        ],
    )
    def test_nothing_to_choose_is_refused_by_environment(
        self, space: gym.Space[Any], row: list[int], message: str
    ) -> None:
        layout = MaskLayout(space)
        mask = np.ones((4, layout.num_choices), np.bool_)
        layout.check(mask)
        mask[2] = row
        with pytest.raises(ConfigurationError, match=message):
            layout.check(mask)


def masked_policy() -> Policy:
    torch.manual_seed(0)
    return make_policy(spaces.Dict(action_mask=spaces.MultiBinary(3), x=BOX), spaces.Discrete(3))


def test_all_methods_of_a_policy_take_the_mask() -> None:
    policy, x = masked_policy(), torch.randn(200, 2)
    only_one = torch.zeros(200, 3, dtype=torch.bool)
    only_one[torch.arange(200), torch.arange(200) % 3] = True
    masked = MaskedObservations({"x": x}, only_one)
    noise = torch.empty(200, 3)
    policy.head.fill_noise(noise)
    action = policy.act(masked, noise)
    assert action.actions.tolist() == policy.greedy(masked)[0].tolist() == [row % 3 for row in range(200)]
    assert (action.log_probs == 0).all()
    evaluation = policy.evaluate(masked, action.actions)
    assert torch.equal(evaluation.log_probs, action.log_probs)
    assert (evaluation.entropies == 0).all()
    assert torch.equal(policy.value(masked), policy.value({"x": x}))


def test_the_network_does_not_see_the_mask() -> None:
    policy = masked_policy()
    assert next(policy.parameters()).shape == (64, 2)
    observations = {"x": torch.randn(2, 2), "action_mask": torch.ones(2, 3)}
    assert without_mask(observations).keys() == {"x"}
    assert without_mask(observations["x"]) is observations["x"]
