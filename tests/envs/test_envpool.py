"""EnvPool, against gymnasium."""

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from puffer_lightning import PPO, RolloutDataModule
from puffer_lightning.envs import check_env, make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import Collector, play

pytest.importorskip("envpool")

CARTPOLE = "envpool:CartPole-v1"


@pytest.fixture
def pools() -> Iterator[Any]:
    """Makes environments, and closes them."""
    made = []

    def make(env: str = CARTPOLE, num_envs: int = 4, render_mode: str | None = None, **kwargs: Any) -> Any:
        made.append(make_vector_env(env, num_envs, kwargs, render_mode))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_steps_as_gymnasium_does(pools: Any) -> None:
    env, reference = pools(num_envs=3), gym.make("CartPole-v1").unwrapped
    random = np.random.default_rng(0)
    observations, _ = env.reset(seed=1)
    ended, ends = np.zeros(3, np.bool_), 0
    for _ in range(100):
        actions = random.integers(2, size=3)
        before = observations
        observations, rewards, terminated, truncated, _ = env.step(actions)
        assert observations in env.observation_space
        assert not truncated.any()
        for row in range(3):
            if ended[row]:
                assert np.abs(observations[row]).max() <= 0.05
                assert (rewards[row], terminated[row]) == (0.0, False)
                continue
            reference.reset()
            reference.state = tuple(before[row].astype(np.float64))  # type: ignore[attr-defined]
            after, reward, end, _, _ = reference.step(actions[row])
            np.testing.assert_allclose(observations[row], after, atol=1e-5)
            assert (rewards[row], terminated[row]) == (reward, end)
        ended = terminated
        ends += ended.sum()
    assert ends > 5


def test_a_step_that_resets_is_not_learned_from(pools: Any) -> None:
    env = pools(num_envs=3, max_episode_steps=7)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    policy = make_policy(env.single_observation_space, env.single_action_space)
    rollout = Collector(env, 24, seed=1).collect(policy)
    assert rollout.valid[:, 0].tolist() == ([True] * 7 + [False]) * 3
    assert rollout.truncated[:, 0].tolist() == ([False] * 6 + [True, False]) * 3
    assert not rollout.terminated.any()
    assert rollout.rewards.bool().equal(rollout.valid)
    assert rollout.episode_lengths.tolist() == rollout.episode_returns.tolist() == [7.0] * 9
    assert play(policy, env, 6, seed=2).lengths.tolist() == [7] * 6


def actions_of(env_ids: Any, steps: Any) -> Any:
    """Depend on environment and step alone, not on who is ready first."""
    return (7 * env_ids + 3 * steps + steps // 5) % 2


def test_what_is_ready_first_is_the_same_as_all_at_once(pools: Any) -> None:
    synchronous, first_ready = pools(num_envs=6), pools(num_envs=6, batch_size=2, num_threads=2)
    observations, _ = synchronous.reset(seed=3)
    ids = np.arange(6)
    expected: list[list[Any]] = [[] for _ in ids]
    for step in range(60):
        results = synchronous.step(actions_of(ids, np.full(6, step)))[:4]
        for row in ids:
            expected[row].append([leaf[row] for leaf in results])

    at_reset, _ = first_ready.reset(seed=3)
    assert np.array_equal(at_reset, observations)
    steps = np.zeros(6, np.int64)
    got: list[list[Any]] = [[] for _ in ids]
    first_ready.send(actions_of(ids, steps), ids)
    while min(map(len, got)) < 60:
        received = first_ready.recv()
        assert len(received.env_ids) == len(received.observations) == 2
        for place, row in enumerate(received.env_ids):
            got[row].append([leaf[place] for leaf in received[1:5]])
        steps[received.env_ids] += 1
        first_ready.send(actions_of(received.env_ids, steps[received.env_ids]), received.env_ids)
    # Compared in the end: nothing that was returned may be overwritten since.
    for row in ids:
        for mine, theirs in zip(got[row], expected[row], strict=False):
            for left, right in zip(mine, theirs, strict=True):
                assert np.array_equal(left, right)


def test_first_ready_environments_step_together_too(pools: Any) -> None:
    synchronous, first_ready = pools(num_envs=6), pools(num_envs=6, batch_size=3, num_threads=2)
    policy = make_policy(first_ready.single_observation_space, first_ready.single_action_space)
    mine, theirs = (Collector(env, 40, seed=5).collect(policy) for env in (first_ready, synchronous))
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "valid"):
        assert getattr(mine, name).equal(getattr(theirs, name)), name


class Backwards:
    """EnvPool, where the environments of the first batch happen to be ready last."""

    def __init__(self, pool: Any, batches: int) -> None:
        self.pool, self.batches = pool, batches

    def send(self, actions: Any, env_ids: Any) -> None:
        self.pool.send(actions, env_ids)
        self.received = [self.pool.recv() for _ in range(self.batches)]

    def recv(self) -> Any:
        return self.received.pop()

    def close(self) -> None:
        self.pool.close()


def test_rows_stay_in_order_whoever_is_ready_first(pools: Any) -> None:
    synchronous, first_ready = pools(num_envs=6), pools(num_envs=6, batch_size=2)
    for env in (synchronous, first_ready):
        env.reset(seed=5)
    first_ready._pool = Backwards(first_ready._pool, 3)
    for step in range(20):
        actions = actions_of(np.arange(6), np.full(6, step))
        *expected, infos = synchronous.step(actions)
        *got, their_infos = first_ready.step(actions)
        for left, right in zip(got, expected, strict=True):
            assert np.array_equal(left, right)
        assert np.array_equal(their_infos["elapsed_step"], infos["elapsed_step"])


def test_a_reset_drops_what_was_sent(pools: Any) -> None:
    env = pools(num_envs=4, batch_size=2)
    first, _ = env.reset(seed=1)
    first = first.copy()
    env.send(np.zeros(4, np.int64), np.arange(4))
    again, _ = env.reset(seed=1)
    assert np.array_equal(first, again)
    env.send(np.zeros(2, np.int64), np.array([3, 1]))
    without_seed, infos = env.reset()
    assert not np.array_equal(without_seed, first)
    assert infos["env_id"].tolist() == [0, 1, 2, 3]
    assert env.step(np.ones(4, np.int64))[1].tolist() == [1.0] * 4


def test_an_environment_has_the_seed_of_its_number(pools: Any) -> None:
    together, _ = pools(num_envs=3).reset(seed=5)
    alone, _ = pools(num_envs=1).reset(seed=7)
    assert np.array_equal(together[2], alone[0])
    assert not np.array_equal(together[1], alone[0])
    assert pools().reset(seed=2**31 + 3)[0].shape == (4, 4), "EnvPool takes an int of 32 bits"


def test_draws_a_frame_of_each(pools: Any) -> None:
    env = pools(num_envs=2, render_mode="rgb_array")
    env.reset(seed=0)
    frames = env.render()
    assert [frame.shape for frame in frames] == [(400, 600, 3)] * 2
    assert frames[0].dtype == np.uint8
    assert not np.array_equal(*frames)
    assert pools().render() is None


def test_continuous_actions_and_other_dtypes(pools: Any) -> None:
    env = pools("envpool:HalfCheetah-v4", num_envs=2)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    rollout = Collector(env, 8).collect(policy)
    assert rollout.observations.shape == (8, 2, 17)
    assert rollout.rewards.std() > 0


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (
            "envpool:CartPol-v1",
            {},
            "env envpool:CartPol-v1 is not one of EnvPool's: did you mean CartPole",
        ),
        (CARTPOLE, {"wind": 1}, "env_kwargs wind do not fit env envpool:CartPole-v1: see envpool.make_spec"),
        (CARTPOLE, {"seed": 1}, r"env_kwargs\.seed .* use seed_everything"),
        (CARTPOLE, {"batch_size": 3}, "batch_size 3 does not divide num_envs 4"),
        (CARTPOLE, {"max_episode_steps": "x"}, "env envpool:CartPole-v1 cannot be made"),
    ],
)
def test_what_cannot_work_is_named(pools: Any, env: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pools(env, **kwargs)


def test_a_name_is_checked_before_anything_is_made() -> None:
    check_env(CARTPOLE)
    with pytest.raises(ConfigurationError, match="did you mean"):
        check_env("envpool:Pnog-v5")


def test_is_collected_from_first_ready() -> None:
    torch.manual_seed(0)
    data = RolloutDataModule(CARTPOLE, num_envs=8, horizon=40, eval_episodes=1, overlap="first_ready")
    model = PPO()
    model.build(data)
    rollout = data.collect(model.policy)
    data.close()
    reference = gym.make("CartPole-v1").unwrapped
    reference.reset()
    for row in range(8):
        for t in torch.nonzero(rollout.valid[:-1, row])[:, 0]:
            reference.state = tuple(rollout.observations[t, row].double().tolist())  # type: ignore[attr-defined]
            reference.steps_beyond_terminated = None  # type: ignore[attr-defined]
            after, _, end, _, _ = reference.step(int(rollout.actions[t, row]))
            np.testing.assert_allclose(rollout.observations[t + 1, row], after, atol=1e-5)
            assert rollout.terminated[t, row] == end
    assert rollout.terminated.any()
