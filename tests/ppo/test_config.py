import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.ppo import PPOConfig


def test_the_defaults_are_fit_for_use() -> None:
    PPOConfig().check()


@pytest.mark.parametrize(
    ("option", "values", "fix"),
    [
        ("gamma", (-0.1, 1.1, float("nan")), "set it between 0 and 1"),
        ("gae_lambda", (-0.1, 1.1), "set it between 0 and 1"),
        ("update_epochs", (0, -1), "set it to 1 or more"),
        ("num_minibatches", (0,), "set it to 1 or more"),
        ("accumulate_grad_batches", (0,), "set it to 1 or more"),
        ("clip_coef", (0.0, -0.2, float("nan")), "set it above 0"),
        ("max_grad_norm", (0.0, -1.0), "set it above 0"),
        ("vf_coef", (-0.5, float("nan")), "set it to 0 or more"),
        ("ent_coef", (-0.01,), "set it to 0 or more"),
        ("clip_rewards", (0.0, -1.0, float("nan")), "set it above 0, or to null"),
        ("target_kl", (0.0, -0.1), "set it above 0, or to null"),
        ("normalize_advantages", ("yes", True, None), "set it to global, rank or none"),
    ],
)
def test_a_coefficient_out_of_its_range_is_named_with_its_fix(
    option: str, values: tuple[Any, ...], fix: str
) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=rf"^{option} is .*: {fix}"):
            PPOConfig(**{option: value}).check()


@pytest.mark.parametrize(
    "coefficients",
    [
        {"gamma": 0.0, "gae_lambda": 0.0},
        {"gamma": 1.0, "gae_lambda": 1.0},
        {"vf_coef": 0.0, "ent_coef": 0.0},
        {"target_kl": 1e-9, "max_grad_norm": float("inf")},
        {"normalize_advantages": "none"},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(coefficients: dict[str, Any]) -> None:
    PPOConfig(**coefficients).check()


def test_sizes_that_divide_are_allowed() -> None:
    PPOConfig(num_minibatches=4, accumulate_grad_batches=8).check_sizes(horizon=8, num_envs=4)


def test_minibatches_that_do_not_divide_the_rollout_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^num_minibatches 5 does not divide the rollout of horizon 8 × num_envs 4 .*: set it to 4",
    ):
        PPOConfig(num_minibatches=5).check_sizes(horizon=8, num_envs=4)


def test_microbatches_that_do_not_divide_the_minibatch_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^accumulate_grad_batches 3 does not divide the minibatch of 8 steps: set it to 2",
    ):
        PPOConfig(num_minibatches=4, accumulate_grad_batches=3).check_sizes(horizon=8, num_envs=4)


def test_a_policy_with_memory_needs_minibatches_of_whole_sequences() -> None:
    PPOConfig(num_minibatches=4).check_sizes(horizon=8, num_envs=6)
    with pytest.raises(
        ConfigurationError, match=r"^num_minibatches 4 does not divide num_envs 6, whose .*: set it to 3"
    ):
        PPOConfig(num_minibatches=4).check_sizes(horizon=8, num_envs=6, sequences=True)
    with pytest.raises(
        ConfigurationError, match=r"does not divide the minibatch of 2 sequences: set it to 2"
    ):
        PPOConfig(num_minibatches=3, accumulate_grad_batches=4).check_sizes(8, 6, sequences=True)


@given(
    num_minibatches=st.integers(1, 200),
    accumulate=st.integers(1, 200),
    horizon=st.integers(1, 32),
    num_envs=st.integers(1, 32),
)
def test_following_the_advice_ends_in_sizes_that_divide(
    num_minibatches: int, accumulate: int, horizon: int, num_envs: int
) -> None:
    config = PPOConfig(num_minibatches=num_minibatches, accumulate_grad_batches=accumulate)
    for _ in range(2):
        try:
            config.check_sizes(horizon, num_envs)
        except ConfigurationError as error:
            option, advice = str(error).split()[0], re.search(r"set it to (\d+)", str(error))
            assert advice is not None
            setattr(config, option, int(advice[1]))
    config.check_sizes(horizon, num_envs)
    config.check()
