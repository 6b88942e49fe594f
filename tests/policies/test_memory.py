from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import CNNPolicy, LSTMPolicy, Policy, TransformerPolicy
from puffer_lightning.policies.multi_input import make_encoder

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (16, 16), np.uint8)
MIXED = spaces.Dict({"eye": IMAGE, "touch": spaces.Discrete(4)})
ACTIONS = spaces.Discrete(3)
T, N = 9, 4


def make(kind: type[Any], observations: spaces.Space[Any] = VECTOR, **options: Any) -> Policy:
    torch.manual_seed(0)
    policy: Policy = kind(observations, ACTIONS, **options)
    torch.nn.init.normal_(policy.head.linear.weight)  # type: ignore[arg-type]
    return policy


def endings(seed: int = 0) -> Tensor:
    return torch.rand(T, N, generator=torch.Generator().manual_seed(seed)) < 0.25


KINDS = [
    pytest.param(LSTMPolicy, {}, id="lstm"),
    pytest.param(TransformerPolicy, {"context": 4, "hidden_size": 16}, id="transformer"),
    pytest.param(TransformerPolicy, {"context": 30, "hidden_size": 16}, id="long-transformer"),
    pytest.param(TransformerPolicy, {"context": 1, "hidden_size": 16}, id="forgetful-transformer"),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@torch.no_grad()
def test_sequences_give_what_single_steps_give(kind: type[Any], options: dict[str, Any]) -> None:
    """Two sequences, of which the second goes on from the state that the first one left."""
    policy = make(kind, **options)
    state = policy.initial_state(N)
    for seed in range(2):
        observations, started = torch.randn(T, N, 3), endings(seed)
        assert started.any()
        before, params, values = state, [], []
        for observation, begins in zip(observations, started, strict=True):
            of_step, value, state = policy(observation, state)
            state = policy.restart(state, begins)
            params.append(of_step)
            values.append(value)
        all_params, all_values = policy.unroll(observations, before, started)
        assert all_params.shape == (T, N, 3)
        assert all_params.std() > 0.1
        assert_close(all_params, torch.stack(params), rtol=0, atol=1e-5)
        assert_close(all_values, torch.stack(values), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_what_forward_gives_for_sequences_is_what_unroll_of_any_policy_gives(
    kind: type[Any], options: dict[str, Any]
) -> None:
    policy, observations, started = make(kind, **options), torch.randn(T, N, 3), endings()
    state = policy.initial_state(N)
    assert_close(
        policy.unroll(observations, state, started),
        Policy.unroll(policy, observations, state, started),
        rtol=0,
        atol=1e-5,
    )


def seen_from(policy: Policy, t: int, started: Tensor) -> list[int]:
    """The steps whose observations the parameters at step t of the first environment depend on."""
    observations = torch.randn(T, N, 3, requires_grad=True)
    params, _ = policy.unroll(observations, policy.initial_state(N), started)
    params[t, 0].square().sum().backward()
    gradients = observations.grad
    assert gradients is not None
    assert not gradients[:, 1:].any(), "environments know nothing of one another"
    return [step for step in range(T) if gradients[step, 0].any()]


def test_an_lstm_remembers_its_episode_and_nothing_before_or_after() -> None:
    started = torch.zeros(T, N, dtype=torch.bool)
    assert seen_from(make(LSTMPolicy), 6, started) == [0, 1, 2, 3, 4, 5, 6]
    started[2, 0] = True
    assert seen_from(make(LSTMPolicy), 6, started) == [3, 4, 5, 6]
    assert seen_from(make(LSTMPolicy), 2, started) == [0, 1, 2]


def test_a_block_attends_to_its_context_within_the_episode() -> None:
    started = torch.zeros(T, N, dtype=torch.bool)
    policy = make(TransformerPolicy, context=4, num_blocks=1)
    assert seen_from(policy, 6, started) == [3, 4, 5, 6]
    # A second block sees what the first made of three steps more.
    assert seen_from(make(TransformerPolicy, context=4, num_blocks=2), 6, started) == [0, 1, 2, 3, 4, 5, 6]
    started[4, 0] = True
    assert seen_from(policy, 6, started) == [5, 6]


def test_positions_are_relative() -> None:
    """The same steps later in a sequence give the same; in another order they do not."""
    policy = make(TransformerPolicy, context=3, num_blocks=1)
    observations = torch.randn(T, 1, 3)
    state, never = policy.initial_state(1), torch.zeros(T, 1, dtype=torch.bool)
    params, _ = policy.unroll(observations, state, never)
    later, _ = policy.unroll(torch.cat((observations[-2:], observations[:-2])), state, never)
    assert_close(later[4:], params[2:-2])
    swapped = observations[[1, 0, *range(2, T)]]
    assert (policy.unroll(swapped, state, never)[0][2] - params[2]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", [LSTMPolicy, TransformerPolicy])
@pytest.mark.parametrize("space", [VECTOR, IMAGE, MIXED, spaces.Discrete(5)], ids=lambda s: type(s).__name__)
def test_any_observation_space_can_be_remembered(kind: type[Any], space: spaces.Space[Any]) -> None:
    policy = make(kind, space)
    samples = [[space.sample() for _ in range(2)] for _ in range(3)]
    if isinstance(space, spaces.Dict):
        observations: Any = {
            key: torch.tensor(np.array([[sample[key] for sample in row] for row in samples])) for key in space
        }
    else:
        observations = torch.tensor(np.array(samples))
    state, started = policy.initial_state(2), torch.zeros(3, 2, dtype=torch.bool)
    evaluation = policy.evaluate(observations, torch.zeros(3, 2, dtype=torch.int64), state, started)
    assert evaluation.log_probs.shape == evaluation.values.shape == (3, 2)
    assert evaluation.log_probs.isfinite().all()


def test_the_encoder_follows_from_the_space() -> None:
    names = [type(make_encoder(space, 8)).__name__ for space in (VECTOR, IMAGE, MIXED)]
    assert names == ["MLPEncoder", "NatureCNN", "MultiInputEncoder"]
    assert make_encoder(MIXED, 8).num_features == 8


def test_policies_without_memory_have_no_state() -> None:
    assert CNNPolicy(IMAGE, ACTIONS).initial_state(2) == ()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LSTMPolicy, {"hidden_size": 0}, "^hidden_size cannot be 0"),
        (TransformerPolicy, {"context": 0}, "^context cannot be 0"),
        (TransformerPolicy, {"hidden_size": 20}, "set it to a multiple of 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(kind: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(kind, **options)
