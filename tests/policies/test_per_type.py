from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    AGENT_TYPE,
    MaskedObservations,
    MLPPolicy,
    ObservationNormalizer,
    PerTypePolicy,
    Policy,
    State,
    make_head,
    make_normalizer,
    make_policies,
    make_policy,
)

OBSERVATIONS = spaces.Dict(
    [
        (AGENT_TYPE, spaces.Discrete(3)),
        ("arm", spaces.Box(-1, 1, (4,), np.float32)),
        ("eye", spaces.Discrete(5)),
        ("leg", spaces.Dict(a=spaces.Box(-9, 9, (2, 3), np.float32), b=spaces.MultiBinary(2))),
    ]
)
ACTIONS = spaces.Dict(
    [
        ("arm", spaces.Box(-1, 1, (2,), np.float32)),
        ("eye", spaces.Discrete(3, start=1)),
        ("leg", spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float32)])),
    ]
)
TYPES = list(ACTIONS)
SIZE = 64


def observed(seed: int = 0) -> Any:
    space = batch_space(OBSERVATIONS, SIZE)
    space.seed(seed)
    return tree_map(torch.as_tensor, dict(space.sample()))


def made() -> PerTypePolicy:
    torch.manual_seed(0)
    policy = make_policies(make_policy, OBSERVATIONS, ACTIONS)
    assert isinstance(policy, PerTypePolicy)
    return policy


def noise_for(policy: Policy) -> Tensor:
    noise = torch.zeros(SIZE, policy.head.noise_size)
    policy.head.fill_noise(noise, torch.Generator().manual_seed(0))
    return noise


def own_parts(policy: PerTypePolicy, observations: Any) -> Any:
    """For each type its policy, its rows, and what they observe."""
    for number, name in enumerate(policy.types):
        rows = (observations[AGENT_TYPE] == number).nonzero().squeeze(-1)
        yield (
            name,
            policy.policies[number],
            rows,
            tree_map(lambda leaf, rows=rows: leaf[rows], observations[name]),
        )


def test_each_row_is_seen_by_the_policy_of_its_type() -> None:
    policy, observations = made(), observed()
    noise = noise_for(policy)
    action = policy.act(observations, noise)
    greedy, _ = policy.greedy(observations)
    evaluation = policy.evaluate(observations, action.actions)
    torch.testing.assert_close(evaluation.log_probs, action.log_probs)
    start = 0
    for name, own, rows, seen in own_parts(policy, observations):
        share = noise[rows, start : start + own.head.noise_size]
        start += own.head.noise_size
        expected = own.act(seen, share)
        chosen = tree_map(lambda leaf, rows=rows: leaf[rows], action.actions[name])
        torch.testing.assert_close(chosen, expected.actions)
        torch.testing.assert_close(action.log_probs[rows], expected.log_probs)
        torch.testing.assert_close(action.values[rows], expected.values)
        torch.testing.assert_close(evaluation.entropies[rows], own.evaluate(seen, chosen).entropies)
        torch.testing.assert_close(
            tree_map(lambda leaf, rows=rows: leaf[rows], greedy[name]), own.greedy(seen)[0]
        )
    assert start == noise.shape[1]
    torch.testing.assert_close(policy.value(observations), action.values)


def test_what_reaches_the_environment_is_in_the_action_space() -> None:
    policy = made()
    actions = policy.head.to_env(policy.act(observed(), noise_for(policy)).actions)
    assert batch_space(ACTIONS, SIZE).contains(tree_map(lambda leaf: leaf.numpy(), actions))
    empty = policy.head.empty_actions(SIZE)
    assert [leaf.shape for leaf in tree_leaves(empty)] == [leaf.shape for leaf in tree_leaves(actions)]


def test_a_policy_learns_from_the_rows_of_its_type_alone() -> None:
    policy, observations = made(), observed()
    observations[AGENT_TYPE][:] = 1
    actions = policy.act(observations, noise_for(policy)).actions
    evaluation = policy.evaluate(observations, actions)
    (evaluation.log_probs + evaluation.entropies + evaluation.values).sum().backward()
    norms = [sum(parameter.grad.norm() for parameter in one.parameters()) for one in policy.policies]  # type: ignore[union-attr, misc]
    assert norms[1] > 0
    assert norms[0] == norms[2] == 0, "zero, and not None, which DDP would wait for"


def test_every_parameter_is_there_once() -> None:
    policy = made()
    assert len(policy.state_dict()) == sum(len(one.state_dict()) for one in policy.policies)
    assert all(key.startswith("policies.") for key in policy.state_dict())


def test_masks_are_those_of_the_own_type() -> None:
    policy, observations = made(), observed()
    mask = torch.ones(SIZE, policy.head.num_choices, dtype=torch.bool)
    assert policy.head.num_choices == 3 + 2
    mask[:, :2] = False  # of the eye's three
    masked = MaskedObservations(observations, mask)
    action = policy.act(masked, noise_for(policy))
    eyes = observations[AGENT_TYPE] == 1
    assert (policy.head.to_env(action.actions)["eye"] == 3).all()
    assert (action.log_probs[eyes] == 0).all()
    free = policy.evaluate(observations, action.actions).log_probs
    torch.testing.assert_close(action.log_probs[~eyes], free[~eyes])
    torch.testing.assert_close(policy.evaluate(masked, action.actions).log_probs, action.log_probs)


def test_options_are_those_of_each_types_policy() -> None:
    policy = make_policies(partial(MLPPolicy, hidden_sizes=(7,)), OBSERVATIONS, ACTIONS)
    assert isinstance(policy, PerTypePolicy)
    assert [one.head.linear.in_features for one in policy.policies if hasattr(one.head, "linear")] == [7, 7]  # type: ignore[union-attr]


def test_other_spaces_have_one_policy() -> None:
    assert isinstance(make_policies(make_policy, OBSERVATIONS["arm"], ACTIONS["arm"]), MLPPolicy)
    assert isinstance(make_normalizer(OBSERVATIONS["arm"]), ObservationNormalizer)


def test_statistics_are_of_what_each_type_observes() -> None:
    space = spaces.Dict([(key, part) for key, part in OBSERVATIONS.items() if key != "eye"])
    space[AGENT_TYPE] = spaces.Discrete(2)
    normalizer = make_normalizer(space)
    observations = {**observed(), AGENT_TYPE: torch.arange(SIZE) % 2}
    valid = torch.arange(SIZE) % 3 > 0
    normalizer.update(tree_map(lambda leaf: leaf[None], observations), valid[None])
    normalized = normalizer(observations)
    assert torch.equal(normalized[AGENT_TYPE], observations[AGENT_TYPE])
    for number, part in enumerate((normalized["arm"], normalized["leg"]["a"])):
        of_type = part[valid & (observations[AGENT_TYPE] == number)]
        torch.testing.assert_close(of_type.mean(0), torch.zeros(part.shape[1:]), atol=1e-5, rtol=0)
        torch.testing.assert_close(of_type.std(0, correction=0), torch.ones(part.shape[1:]))
    with pytest.raises(ConfigurationError, match="nothing to normalise"):
        make_normalizer(OBSERVATIONS)


class Counting(Policy):
    """Remembers how often it was asked."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.head = make_head(1, action_space)

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        return torch.zeros(num_envs, device=device)

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        return self.head(torch.zeros(len(state), 1)), state, state + 1


def test_each_policy_has_its_memory() -> None:
    policy = make_policies(Counting, OBSERVATIONS, ACTIONS)
    state = policy.initial_state(SIZE)
    for number in range(3):
        _, values, state = policy(observed(), state)
        assert values.eq(number).all()
    state = policy.restart(state, torch.arange(SIZE) < 5)
    assert [leaf.tolist() for leaf in tree_leaves(state)] == [[0.0] * 5 + [3.0] * (SIZE - 5)] * 3
