"""Atari games, against ALE stepped by hand."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.fabric import Fabric
from torch.nn.functional import interpolate

from puffer_lightning import PPO, RolloutDataModule, iterations
from puffer_lightning.distributed import derive_seed
from puffer_lightning.envs import make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import Collector

ale_vector_env = pytest.importorskip("ale_py.vector_env")

PONG = "ale_py:ALE/Pong-v5"
BREAKOUT = "ale_py:ALE/Breakout-v5"


@pytest.fixture(autouse=True)
def _metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ALE, stepped by hand, writes to all vector environments."""
    monkeypatch.setattr(VectorEnv, "metadata", {})


@pytest.fixture
def games() -> Iterator[Any]:
    """Makes games, and closes them."""
    made = []

    def make(env: str = PONG, num_envs: int = 2, render_mode: str | None = None, **kwargs: Any) -> Any:
        made.append(make_vector_env(env, num_envs, kwargs, render_mode))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.mark.parametrize(("env_id", "game"), [(PONG, "pong"), (BREAKOUT, "breakout")])
def test_rollouts_hold_what_ale_returns(games: Any, env_id: str, game: str) -> None:
    # 400 frames: several episodes, each of which begins with a step that plays nothing.
    env = games(env_id, num_envs=3, max_num_frames_per_episode=400)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    rollout = Collector(env, 160, seed=3).collect(policy)

    by_hand = ale_vector_env.AtariVectorEnv(
        game, 3, repeat_action_probability=0.25, reward_clipping=False, max_num_frames_per_episode=400
    )
    observations, _ = by_hand.reset(seed=derive_seed(3, "environments"))
    ended = np.zeros(3, np.bool_)
    for t in range(160):
        assert np.array_equal(rollout.observations[t], observations)
        observations, rewards, terminated, truncated, _ = by_hand.step(rollout.actions[t].numpy())
        assert np.array_equal(rollout.rewards[t], rewards)
        assert np.array_equal(rollout.terminated[t], terminated)
        assert np.array_equal(rollout.truncated[t], truncated)
        assert np.array_equal(rollout.valid[t], ~ended)
        ended = terminated | truncated
    assert rollout.truncated.any()
    assert not rollout.valid.all()
    assert rollout.rewards.any()


@pytest.mark.parametrize("env_id", [PONG, BREAKOUT])
def test_is_trained_on(env_id: str) -> None:
    torch.manual_seed(0)
    data = RolloutDataModule(env_id, num_envs=2, horizon=16, total_timesteps=32, eval_episodes=1)
    model = PPO(num_minibatches=2, update_epochs=1, clip_rewards=1.0)
    [metrics] = iterations(Fabric(accelerator="cpu", devices=1), model, data)
    data.close()
    assert metrics["train/grad_norm"] > 0
    assert np.isfinite(list(metrics.values())).all()


def test_rewards_are_the_score(games: Any) -> None:
    dot = 10.0
    for options, rewards in (({}, {0.0, dot}), ({"reward_clipping": True}, {0.0, 1.0})):
        env = games("ale_py:ALE/MsPacman-v5", 1, **options)
        env.reset(seed=1)
        assert {float(env.step(np.full(1, 3))[1][0]) for _ in range(100)} == rewards


def test_an_environment_has_the_seed_of_its_number(games: Any) -> None:
    env = games(num_envs=6)
    # After how many frames of no action the games begin.
    begins, shifted = (env.reset(seed=seed)[1]["frame_number"].tolist() for seed in (5, 6))
    assert len(set(begins)) > 2
    assert begins[1:] == shifted[:-1]
    beyond, _ = env.reset(seed=2**31 - 2)
    assert beyond in env.observation_space, "ALE takes an int of 32 bits"


def test_draws_the_screen_of_the_game_that_is_played(games: Any) -> None:
    env = games(num_envs=2, render_mode="rgb_array", max_num_frames_per_episode=200)
    watched, unwatched = env, games(num_envs=2, max_num_frames_per_episode=200)
    random = np.random.default_rng(0)
    seen, _ = watched.reset(seed=4)
    assert np.array_equal(seen, unwatched.reset(seed=4)[0])
    for _ in range(120):
        actions = random.integers(6, size=2)
        seen, *_ = watched.step(actions)
        assert np.array_equal(seen, unwatched.step(actions)[0])
        frames = np.stack(watched.render())
        assert frames.shape == (2, 210, 160, 3)
        assert frames.dtype == np.uint8
        gray = torch.from_numpy(frames @ [0.299, 0.587, 0.114])[None]
        small = interpolate(gray, (84, 84), mode="area")[0].numpy()
        # Another game's ball and paddles would be elsewhere.
        assert np.abs(small - seen[:, -1]).mean() < 1.5
    assert watched.metadata["render_fps"] == 15
    assert unwatched.render() is None


def test_leaves_other_vector_environments_alone(games: Any) -> None:
    env = games(autoreset_mode=AutoresetMode.SAME_STEP)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert games().metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert "autoreset_mode" not in VectorEnv.metadata


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 1}, r"env_kwargs\.batch_size does not work for Atari"),
        ({"life_loss_info": True}, r"env_kwargs\.life_loss_info .* episodic_life"),
        ({"wind": 1}, r"env_kwargs .* do not fit env ale_py:ALE/Pong-v5.*'wind'"),
    ],
)
def test_what_cannot_work_is_named(games: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        games(**kwargs)
