"""Policies and heads for random spaces, Dict and Tuple nested at will."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    HybridHead,
    MultiInputEncoder,
    MultiInputPolicy,
    Policy,
    make_head,
    make_policy,
)
from puffer_lightning.policies.encoders import FlatObservations
from puffer_lightning.policies.nesting import leaf_spaces, select
from tests.policies.nested_spaces import ACTION_SPACES, OBSERVATION_SPACES, VECTOR_SPACES, batch, rows

SIZE = 5
FRAMES = spaces.Box(0, 255, (16, 16, 3), np.uint8)
MIXED = spaces.Dict(
    camera=FRAMES,
    body=spaces.Tuple([spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4)]),
    keys=spaces.MultiBinary(2),
)
HYBRID = spaces.Dict(
    move=spaces.Discrete(3, start=1),
    aim=spaces.Tuple([spaces.Box(-2.0, 2.0, (2,), np.float64), spaces.MultiDiscrete([2, 4])]),
    keys=spaces.MultiBinary((2, 2)),
)


def noise_for(head: Any, *leading: int) -> torch.Tensor:
    noise = torch.empty(*leading, head.noise_size)
    head.fill_noise(noise, torch.Generator().manual_seed(0))
    return noise


def acted(policy: Policy, observations: Any) -> Any:
    return policy.act(observations, noise_for(policy.head, SIZE))


def described(actions: Any) -> Any:
    return tree_map(lambda leaf: (leaf.shape, leaf.dtype), actions)


@given(VECTOR_SPACES)
@settings(max_examples=50, deadline=None)
def test_vectors_are_gymnasiums_flattened_leaves_side_by_side(space: gym.Space[Any]) -> None:
    observations = batch(space, SIZE)
    flat = FlatObservations(space)(observations, torch.float64)
    for row, member in enumerate(rows(observations, SIZE)):
        expected = []
        for path, leaf in leaf_spaces(space).items():
            scale = leaf.high.max() if isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 else 1
            expected.append(spaces.flatten(leaf, select(member, path)) / scale)
        np.testing.assert_allclose(flat[row].numpy(), np.concatenate(expected), rtol=1e-6)


@given(OBSERVATION_SPACES, ACTION_SPACES)
@settings(max_examples=40, deadline=None)
def test_the_default_policy_acts_and_evaluates_in_any_spaces(
    observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    policy = make_policy(observation_space, action_space)
    observations = batch(observation_space, SIZE)
    with torch.no_grad():
        action = acted(policy, observations)
        evaluation = policy.evaluate(observations, action.actions)
        greedy, _ = policy.greedy(observations)
    assert torch.equal(action.log_probs, evaluation.log_probs)
    assert torch.equal(action.values, evaluation.values)
    assert evaluation.entropies.shape == (SIZE,)
    assert described(action.actions) == described(policy.head.empty_actions(SIZE))
    for actions in (action.actions, greedy):
        for given_to_env in rows(policy.head.to_env(actions), SIZE):
            assert action_space.contains(given_to_env)


@given(OBSERVATION_SPACES)
@settings(max_examples=25, deadline=None)
def test_every_leaf_of_the_observations_counts(space: gym.Space[Any]) -> None:
    encoder = MultiInputEncoder(space, image_size=16, vector_sizes=(64,), hidden_size=64)
    first = batch(space, 64)
    second = batch(space, 64, seed=1)
    for path in leaf_spaces(space):
        changed = tree_map(torch.clone, first)
        leaf = select(changed, path)
        if torch.equal(leaf, select(second, path)):
            continue  # a space of one member
        leaf.copy_(select(second, path))
        assert not torch.equal(encoder(changed), encoder(first)), path


def test_images_go_through_cnns_and_the_rest_through_one_mlp() -> None:
    encoder = MultiInputEncoder(MIXED, image_size=7, vector_sizes=(11, 5), hidden_size=9)
    assert encoder.image_paths == (("camera",),)
    assert encoder.images[0].linear.out_features == 7
    assert encoder.vectors is not None
    assert [tuple(p.shape) for p in encoder.vectors.parameters()] == [(11, 9), (11,), (5, 11), (5,)]
    assert encoder.joint.weight.shape == (9, 7 + 5)


def test_gradients_reach_every_parameter_of_a_mixed_policy() -> None:
    policy = MultiInputPolicy(MIXED, HYBRID, image_size=16, hidden_size=16)
    observations = batch(MIXED, 32)
    actions = policy.act(observations, noise_for(policy.head, 32)).actions
    evaluation = policy.evaluate(observations, actions)
    (evaluation.log_probs + evaluation.entropies + evaluation.values).square().mean().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_options_of_multi_input_policies_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"network 'vgg'.*nature, impala"):
        MultiInputPolicy(MIXED, HYBRID, network="vgg")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="image_size"):
        MultiInputPolicy(MIXED, HYBRID, image_size=0)
    with pytest.raises(ConfigurationError, match="hidden_size"):
        MultiInputPolicy(MIXED, HYBRID, hidden_size=0)


def test_a_hybrid_is_its_parts_independently() -> None:
    head = make_head(8, HYBRID)
    assert isinstance(head, HybridHead)
    params = head(torch.randn(6, 8))
    noise = noise_for(head, 6)
    actions, log_probs = head.sample(params, noise)
    evaluated, entropies = head.evaluate(params, actions)
    assert torch.equal(log_probs, evaluated)
    expected_log_probs, expected_entropies = torch.zeros(6), torch.zeros(6)
    start, noise_start = 0, 0
    for path, part in zip(leaf_spaces(HYBRID), head.parts, strict=True):
        share = params[:, start : start + part.num_params]
        part_noise = noise[:, noise_start : noise_start + part.noise_size]
        start, noise_start = start + part.num_params, noise_start + part.noise_size
        assert torch.equal(select(actions, path), part.sample(share, part_noise)[0])
        assert torch.equal(select(head.mode(params), path), part.mode(share))
        part_log_probs, part_entropies = part.evaluate(share, select(actions, path))
        expected_log_probs += part_log_probs
        expected_entropies += part_entropies
    assert start == params.shape[1] == head.num_params
    torch.testing.assert_close(log_probs, expected_log_probs)
    torch.testing.assert_close(entropies, expected_entropies)


def test_noise_of_a_hybrid_is_gumbel_for_choices_and_normal_for_boxes() -> None:
    head = make_head(8, spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))]))
    noise = noise_for(head, 20_000)
    assert noise[:, :2].mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise[:, 2:].mean().item() == pytest.approx(0.0, abs=0.03)
    assert noise[:, 2:].std().item() == pytest.approx(1.0, abs=0.03)
    assert math.isclose(noise[:, :2].std().item(), math.pi / math.sqrt(6), rel_tol=0.03)


def test_options_of_box_actions_reach_the_boxes_of_a_hybrid() -> None:
    head = make_head(8, HYBRID, squash=True, log_std_init=-1.5)
    assert dict(head.named_parameters())["parts.1.log_std"].tolist() == [-1.5, -1.5]
    given_to_env = head.to_env(tree_map(lambda leaf: leaf + 100, make_head(8, HYBRID).empty_actions(1)))
    assert given_to_env["aim"][0].tolist() == [[2.0, 2.0]]
    with pytest.raises(ConfigurationError, match="set squash_actions to false"):
        make_head(8, spaces.Dict(a=spaces.Discrete(2)), squash=True)


def test_hybrids_compile_without_graph_breaks() -> None:
    policy = make_policy(MIXED, HYBRID)
    observations = batch(MIXED, SIZE)
    with torch.no_grad():
        expected = acted(policy, observations)
        act = torch.compile(policy.act, fullgraph=True, backend="aot_eager")
        compiled = act(observations, noise_for(policy.head, SIZE))
    for one, other in zip(tree_leaves(compiled), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
