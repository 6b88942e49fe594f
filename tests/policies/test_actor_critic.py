from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from jsonargparse import ArgumentParser
from torch import Tensor

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import CNNPolicy, MLPPolicy, MultiInputPolicy, Policy, make_policy

VECTOR = spaces.Box(-1.0, 1.0, (4,))
FRAMES = spaces.Box(0, 255, (1, 16, 16), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 3]),
    "box": spaces.Box(-1.0, 1.0, (2,)),
}
POLICIES = {
    **{name: MLPPolicy(VECTOR, space) for name, space in ACTIONS.items()},
    "shared": MLPPolicy(VECTOR, ACTIONS["discrete"], shared=True),
    "squashed": MLPPolicy(VECTOR, ACTIONS["box"], squash_actions=True),
    "from discrete": MLPPolicy(spaces.Discrete(6), ACTIONS["discrete"]),
    "nature": CNNPolicy(FRAMES, ACTIONS["discrete"], hidden_size=32),
    "impala": CNNPolicy(FRAMES, ACTIONS["box"], network="impala", hidden_size=32, squash_actions=True),
}
OBSERVATION_SPACES: dict[str, gym.Space[Any]] = {
    "from discrete": spaces.Discrete(6),
    "nature": FRAMES,
    "impala": FRAMES,
}


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def observe(name: str, count: int = 32) -> Tensor:
    space = batch_space(OBSERVATION_SPACES.get(name, VECTOR), count)
    space.seed(0)
    return torch.from_numpy(space.sample())


def noise_for(policy: Policy, count: int = 32) -> Tensor:
    noise = torch.empty(count, policy.head.noise_size)
    policy.head.fill_noise(noise, torch.Generator().manual_seed(0))
    return noise


def singular_values(weight: Tensor) -> Tensor:
    return torch.linalg.svdvals(weight)


def test_acting_and_evaluating_agree(name: str) -> None:
    policy, observations = POLICIES[name], observe(name)
    action = policy.act(observations, noise_for(policy))
    evaluation = policy.evaluate(observations, action.actions)
    assert torch.equal(action.log_probs, evaluation.log_probs)
    assert torch.equal(action.values, evaluation.values)
    assert torch.equal(action.values, policy.value(observations))
    assert action.actions.shape == (32, *policy.head.action_shape)
    assert action.values.shape == evaluation.entropies.shape == (32,)
    assert action.state == policy.initial_state(32) == ()
    assert len(action.actions.unique()) > 1


def test_gradients_reach_every_parameter(name: str) -> None:
    policy, observations = POLICIES[name], observe(name)
    actions = policy.act(observations, noise_for(policy)).actions
    policy.zero_grad()
    evaluation = policy.evaluate(observations, actions)
    (evaluation.log_probs + evaluation.entropies + evaluation.values).square().mean().backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


def test_state_dict_round_trip(name: str) -> None:
    policy, observations = POLICIES[name], observe(name)
    torch.manual_seed(1)
    options: dict[str, dict[str, Any]] = {
        "shared": {"shared": True},
        "squashed": {"squash_actions": True},
        "nature": {"hidden_size": 32},
        "impala": {"network": "impala", "hidden_size": 32, "squash_actions": True},
    }
    action_space = ACTIONS.get(name, ACTIONS["box" if name in ("squashed", "impala") else "discrete"])
    observation_space = OBSERVATION_SPACES.get(name, VECTOR)
    other = type(policy)(observation_space, action_space, **options.get(name, {}))
    assert not torch.equal(other.value(observations), policy.value(observations))
    other.load_state_dict(policy.state_dict())
    first, second = (p.act(observations, noise_for(p)) for p in (policy, other))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))


def test_log_probs_stay_float32_and_close_under_autocast(name: str) -> None:
    policy, observations = POLICIES[name], observe(name)
    actions = policy.act(observations, noise_for(policy)).actions
    exact = policy.evaluate(observations, actions)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = policy.evaluate(observations, actions)
    assert {result.dtype for result in rounded} == {torch.float32}
    torch.testing.assert_close(rounded.entropies, exact.entropies, rtol=0.02, atol=0.02)
    # The network itself rounds, so the results must differ somewhere.
    assert not torch.equal(rounded.values, exact.values)


def test_initial_distribution_is_nearly_the_same_everywhere() -> None:
    params, _, _ = MLPPolicy(VECTOR, spaces.Discrete(3))(observe("discrete"))
    assert params.abs().max() < 0.2


def test_gains_of_the_last_layers() -> None:
    torch.manual_seed(0)
    for policy in (MLPPolicy(VECTOR, ACTIONS["box"]), CNNPolicy(FRAMES, ACTIONS["box"])):
        torch.testing.assert_close(singular_values(policy.head.linear.weight), torch.full((2,), 0.01))
        torch.testing.assert_close(singular_values(policy.critic.weight), torch.ones(1))


def test_separate_trunks_do_not_share_and_shared_ones_do() -> None:
    separate, shared = MLPPolicy(VECTOR, ACTIONS["box"]), MLPPolicy(VECTOR, ACTIONS["box"], shared=True)
    for policy in (separate, shared):
        policy.value(observe("box")).sum().backward()
    assert all(p.grad is None for p in separate.encoder.parameters())
    assert all(p.grad is not None for p in shared.encoder.parameters())
    assert shared.critic_encoder is None


def test_options_reach_the_network() -> None:
    policy = MLPPolicy(VECTOR, ACTIONS["box"], (7, 5), "relu", log_std_init=-1.0)
    shapes = [tuple(p.shape) for p in policy.encoder.parameters()]
    assert shapes == [(7, 4), (7,), (5, 7), (5,)]
    assert dict(policy.named_parameters())["head.log_std"].tolist() == [-1.0, -1.0]
    assert (policy.encoder(observe("box")) >= 0).all()


@pytest.mark.parametrize("action", ["discrete", "box", "multidiscrete", "squashed"])
def test_evaluate_compiles_without_graph_breaks(action: str) -> None:
    policy, observations = POLICIES[action], observe(action)
    actions = policy.act(observations, noise_for(policy)).actions
    expected = policy.evaluate(observations, actions)
    compiled = torch.compile(policy.evaluate, fullgraph=True, backend="aot_eager")(observations, actions)
    for result, reference in zip(compiled, expected, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_act_compiles_without_graph_breaks(action: str) -> None:
    policy, observations = POLICIES[action], observe(action)
    with torch.no_grad():
        expected = policy.act(observations, noise_for(policy))
        compiled = torch.compile(policy.act, fullgraph=True, backend="aot_eager")(
            observations, noise_for(policy)
        )
    torch.testing.assert_close(compiled.actions, expected.actions)
    torch.testing.assert_close(compiled.log_probs, expected.log_probs)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (VECTOR, MLPPolicy),
        (spaces.Discrete(4), MLPPolicy),
        (spaces.Box(0, 255, (128,), np.uint8), MLPPolicy),
        (FRAMES, CNNPolicy),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), CNNPolicy),
        (spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), MLPPolicy),
        (spaces.Tuple([VECTOR, spaces.Dict(camera=FRAMES)]), MultiInputPolicy),
        (spaces.Dict(observation=FRAMES, action_mask=spaces.MultiBinary(3)), MultiInputPolicy),
    ],
)
def test_make_policy_chooses_by_the_observations(space: gym.Space[Any], expected: type[Policy]) -> None:
    assert type(make_policy(space, ACTIONS["discrete"])) is expected


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(VECTOR), spaces.Graph(VECTOR, None)])
def test_unsupported_observations_are_refused_by_name(space: gym.Space[Any]) -> None:
    for nested in (space, spaces.Dict(a=FRAMES, b=spaces.Tuple([space]))):
        with pytest.raises(ConfigurationError, match=f"^{type(space).__name__} observation spaces"):
            make_policy(nested, ACTIONS["discrete"])


def test_unknown_network_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"network 'vgg'.*nature, impala"):
        CNNPolicy(FRAMES, ACTIONS["discrete"], network="vgg")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy_type", [MLPPolicy, CNNPolicy])
def test_the_command_line_can_show_and_parse_the_options(policy_type: type[Policy]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(policy_type, "policy", skip={"observation_space", "action_space"})
    assert "Initial logarithm of the standard deviation" in parser.format_help()
    flag = "--policy.hidden_sizes=[8,4]" if policy_type is MLPPolicy else "--policy.hidden_size=8"
    options = dict(vars(parser.parse_args([flag, "--policy.squash_actions=true"]).policy))
    policy = policy_type(FRAMES, ACTIONS["box"], **options)
    assert policy.head.linear.in_features == (4 if policy_type is MLPPolicy else 8)


def test_a_separate_critic_or_its_actor_can_be_left_out() -> None:
    policy, observations = MLPPolicy(VECTOR, ACTIONS["box"]), observe("box")
    assert policy.separate_critic
    assert not MLPPolicy(VECTOR, ACTIONS["box"], shared=True).separate_critic
    whole, noise = policy.act(observations, noise_for(policy)), noise_for(policy)
    alone = policy.act(observations, noise, values=False)
    assert torch.equal(alone.actions, whole.actions)
    assert torch.equal(alone.log_probs, whole.log_probs)
    assert alone.values.shape == (0,)
    (alone.log_probs.sum() + policy.value(observations).sum()).backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    assert policy.critic_encoder is not None
    policy.critic_encoder.forward = None  # type: ignore[assignment, method-assign]
    assert torch.equal(policy.act(observations, noise, values=False).actions, whole.actions)
    assert torch.equal(
        policy.greedy(observations)[0], policy.head.mode(policy.head(policy.encoder(observations)))
    )


def test_a_subclass_whose_forward_knows_no_parts_is_asked_for_none() -> None:
    class Doubled(MLPPolicy):
        def forward(self, observations: Any, state: Any = ()) -> Any:  # type: ignore[override]
            params, values, state = super().forward(observations, state)
            return params, 2 * values, state

    policy = Doubled(VECTOR, ACTIONS["box"])
    assert not policy.separate_critic
    assert policy.act(observe("box"), noise_for(policy)).values.shape == (32,)
    assert policy.value(observe("box")).shape == (32,)
