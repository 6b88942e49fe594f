"""What each sanity environment is about: its optimum, the scores around it, and its closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import (
    SANITY_ENVS,
    Bandit,
    ContinuousTarget,
    DelayedCredit,
    ImageTarget,
    MultiDiscreteMatch,
    Password,
    ResetStep,
    SanityVectorEnv,
    Squared,
    Stochastic,
    TerminatedValue,
    TruncatedValue,
)

Act = Callable[[np.ndarray], np.ndarray]

ROWS = 256


def always(*action: float) -> Act:
    value = np.asarray(action[0] if len(action) == 1 else action)
    return lambda observation: np.broadcast_to(value, (len(observation), *value.shape))


def mean_return(env: SanityVectorEnv, act: Act, steps: int = 200) -> float:
    """Mean return of the episodes that end in ``steps`` steps of each row."""
    observation, _ = env.reset(seed=0)
    running = np.zeros(env.num_envs)
    returns: list[float] = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        done = terminated | truncated
        running += reward
        returns += running[done].tolist()
        running[done] = 0
        if env.autoreset_mode is AutoresetMode.DISABLED and done.any():
            observation, _ = env.reset(options={"reset_mask": done})
    assert len(returns) > env.num_envs
    return float(np.mean(returns))


def mixture() -> Act:
    rng = np.random.default_rng(1234)
    return lambda observation: (rng.random(len(observation)) < Stochastic.best_mixture).astype(np.int64)


def type_password(observation: np.ndarray) -> np.ndarray:
    return np.asarray(observation @ np.asarray(Password.password), dtype=np.int64)


def visit_in_order(observation: np.ndarray) -> np.ndarray:
    """Go straight to the first target that is left: its number is also the move towards it."""
    return np.asarray(observation[:, 2:].argmax(axis=1))


def brightest_quarter(observation: np.ndarray) -> np.ndarray:
    brightness = observation.reshape(-1, 2, 8, 2, 8).mean(axis=(2, 4))
    return np.asarray(brightness.reshape(-1, 4).argmax(axis=1))


def match_parts(observation: np.ndarray) -> np.ndarray:
    return np.stack([part.argmax(axis=1) for part in np.split(observation, [2, 5], axis=1)], axis=1)


OPTIMAL: dict[type[SanityVectorEnv], Callable[[], Act]] = {
    Bandit: lambda: always(2),
    Stochastic: mixture,
    Password: lambda: type_password,
    Squared: lambda: visit_in_order,
    DelayedCredit: lambda: lambda observation: (observation[:, 0] > 0).astype(np.int64),
    TruncatedValue: lambda: always(0),
    TerminatedValue: lambda: always(0),
    ResetStep: lambda: lambda observation: observation[:, 1].astype(np.int64),
    ContinuousTarget: lambda: lambda observation: ContinuousTarget().target(observation).astype(np.float32),
    ImageTarget: lambda: brightest_quarter,
    MultiDiscreteMatch: lambda: match_parts,
}


def test_every_environment_has_an_optimal_policy_here() -> None:
    assert set(OPTIMAL) == set(SANITY_ENVS.values())


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("cls", OPTIMAL, ids=lambda cls: cls.__name__)
def test_the_optimal_policy_reaches_the_stated_optimum(
    cls: type[SanityVectorEnv], mode: AutoresetMode
) -> None:
    score = mean_return(cls(ROWS, autoreset_mode=mode), OPTIMAL[cls]())
    assert score == pytest.approx(cls.optimal_return, abs=0.02)
    assert score > cls.solved_at


@pytest.mark.parametrize("cls", OPTIMAL, ids=lambda cls: cls.__name__)
def test_chance_scores_as_stated_and_solves_nothing(cls: type[SanityVectorEnv]) -> None:
    env = cls(ROWS, autoreset_mode=AutoresetMode.SAME_STEP)
    env.action_space.seed(4321)
    score = mean_return(env, lambda observation: env.action_space.sample(), steps=400)
    assert score == pytest.approx(cls.random_return, abs=0.03)
    assert score < cls.solved_at < cls.optimal_return


@pytest.mark.parametrize(
    ("cls", "act", "expected"),
    [
        (Bandit, always(1), 0.5),
        (Stochastic, always(1), 0.0),
        (Stochastic, always(0), -8.0),
        (Password, always(1), 0.0),
        (Squared, always(0), 0.25),
        (DelayedCredit, always(1), 0.5),
        (TruncatedValue, always(1), 0.75),
        (TerminatedValue, always(1), 0.5),
        (ResetStep, always(1), 0.35),
        (ContinuousTarget, always(1.0, -1.0), -8 / 15),
        (ContinuousTarget, lambda seen: np.clip(ContinuousTarget().target(seen), -1, 1), -4 / 15),
        (ImageTarget, always(3), 0.25),
        (ImageTarget, lambda seen: brightest_quarter(seen.swapaxes(2, 3)), 0.5),
        (MultiDiscreteMatch, lambda seen: match_parts(seen) * np.array([1, 1, 0]), 0.75),
    ],
)
def test_the_wrong_policies_named_in_the_docstrings_score_as_they_say(
    cls: type[SanityVectorEnv], act: Act, expected: float
) -> None:
    # The first episodes after a full reset of TruncatedValue start in the garden: they need to wash out.
    score = mean_return(cls(ROWS, autoreset_mode=AutoresetMode.SAME_STEP), act, steps=700)
    assert score == pytest.approx(expected, abs=0.02)
    assert score < cls.solved_at


def test_bandit_rewards_are_noisy() -> None:
    env = Bandit(4096)
    env.reset(seed=0)
    reward = env.step(np.full(4096, 3))[1]
    assert reward.mean() == pytest.approx(Bandit.means[3], abs=0.05)
    assert reward.std() == pytest.approx(Bandit.noise, abs=0.05)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.7, 0.9, 1.0])
def test_no_mixture_beats_the_stated_one(p: float) -> None:
    def expected_return(p: float) -> float:
        length, q = Stochastic.episode_length, Stochastic.target_fraction
        return 1 - ((p - q) ** 2 + p * (1 - p) / length) / (1 - q) ** 2

    assert expected_return(Stochastic.best_mixture) == pytest.approx(Stochastic.optimal_return)
    assert expected_return(p) < Stochastic.optimal_return
    rng = np.random.default_rng(99)
    score = mean_return(Stochastic(ROWS), lambda observation: rng.binomial(1, p, len(observation)))
    assert score == pytest.approx(expected_return(p), abs=0.05)


def test_one_wrong_bit_spoils_the_password() -> None:
    for wrong in range(5):
        typed = np.array(Password.password)
        typed[wrong] ^= 1
        env = Password()
        env.reset()
        steps = [env.step(bit[None]) for bit in typed]
        assert [step[1].item() for step in steps] == [0] * 5
        assert [step[2].item() for step in steps] == [False] * 4 + [True]


def test_squared_pays_a_target_once_and_truncates() -> None:
    env = Squared()
    env.reset()
    steps = [env.step(np.array([0])) for _ in range(20)]
    assert [step[1].item() for step in steps] == [0, 0.25] + [0] * 18
    assert [step[3].item() for step in steps] == [False] * 19 + [True]
    assert not any(step[2].item() for step in steps)


def test_delayed_credit_shows_the_cue_once_and_pays_last() -> None:
    env = DelayedCredit(64)
    observation, _ = env.reset(seed=0)
    assert set(observation[:, 0]) == {-1.0, 1.0}
    action = (observation[:, 0] > 0).astype(np.int64)
    for step in range(8):
        observation, reward, terminated, truncated, _ = env.step(action if step == 0 else 1 - action)
        assert not observation[:, 0].any()
        assert np.all(reward == (step == 7))
        assert np.all(terminated == (step == 7))
        assert not truncated.any()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("distance", [0, 1, TruncatedValue.corridor])
def test_the_true_value_is_that_of_a_rollout_through_truncations(gamma: float, distance: int) -> None:
    env = TruncatedValue(autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    if distance:
        env.step(np.array([1]))
        for _ in range(TruncatedValue.corridor - distance):
            env.step(np.array([0]))
    assert env.distance.item() == distance
    rewards = np.array([env.step(np.array([0]))[1].item() for _ in range(4000)], dtype=np.float64)
    discounted = float(np.sum(gamma ** np.arange(4000, dtype=np.float64) * rewards))
    assert discounted == pytest.approx(TruncatedValue.true_value(gamma, distance), rel=1e-12)


def test_only_a_full_reset_leads_back_to_the_garden() -> None:
    env = TruncatedValue(2, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    _, reward, terminated, truncated, _ = env.step(np.array([0, 1]))
    assert (reward.tolist(), terminated.tolist(), truncated.tolist()) == (
        [1, 3],
        [False, True],
        [False, False],
    )
    observation, _ = env.reset(options={"reset_mask": np.array([False, True])})
    assert observation.tolist() == [[1, 0], [0, 1]]
    observation, _ = env.reset()
    assert observation.tolist() == [[1, 0], [1, 0]]


def test_the_choice_turns_on_how_truncation_and_termination_are_treated() -> None:
    for gamma in (0.9, 0.99):
        as_termination = sum(gamma**step for step in range(TruncatedValue.time_limit))
        assert as_termination < TruncatedValue.leave_reward < TruncatedValue.true_value(gamma)
        assert TerminatedValue.jump_reward < gamma**2 < TerminatedValue.jump_reward + gamma


def test_a_jump_ends_on_the_sight_of_the_goal() -> None:
    env = TerminatedValue(2, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    observation, reward, terminated, _, infos = env.step(np.array([0, 1]))
    assert reward.tolist() == [0, 0.5]
    assert terminated.tolist() == [False, True]
    assert infos["final_obs"][1].tolist() == [0, 0, 1]
    assert observation.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_every_episode_of_reset_step_ends_in_the_swamp() -> None:
    env = ResetStep(512, autoreset_mode=AutoresetMode.SAME_STEP)
    start, _ = env.reset(seed=0)
    swamp = start[:, 1] == 1
    assert swamp.mean() == pytest.approx(ResetStep.swamp_share, abs=0.05)
    _, reward, terminated, truncated, infos = env.step(np.ones(512, dtype=np.int64))
    assert np.stack(infos["final_obs"]).tolist() == [[0, 1]] * 512
    assert np.array_equal(truncated, ~swamp)
    assert np.array_equal(terminated, swamp)
    assert np.array_equal(reward, np.where(swamp, 0, np.float32(0.4)))


def test_continuous_actions_are_clipped_to_the_bounds() -> None:
    env, twin = ContinuousTarget(8), ContinuousTarget(8)
    env.reset(seed=0)
    twin.reset(seed=0)
    wild = np.full((8, 2), 50.0, dtype=np.float32)
    at_the_bounds = np.broadcast_to(np.array(ContinuousTarget.high, np.float32), (8, 2))
    assert np.array_equal(env.step(wild)[1], twin.step(at_the_bounds)[1])
