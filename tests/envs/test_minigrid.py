"""MiniGrid's observations as policies see them, against MiniGrid's own encoding."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from puffer_lightning import PPO, RolloutDataModule, iterations
from puffer_lightning.envs import make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.encoders import FlatObservations

pytest.importorskip("minigrid")
from minigrid.wrappers import FullyObsWrapper, OneHotPartialObsWrapper

from puffer_lightning.envs.minigrid import Categories

FETCH = "MiniGrid-Fetch-5x5-N2-v0"


def walks(env: gym.Env[Any, Any], steps: int) -> list[Any]:
    """Observations of random actions."""
    env.action_space.seed(0)
    seen = [env.reset(seed=0)[0]]
    while len(seen) < steps:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        seen.append(env.reset()[0] if terminated or truncated else observation)
    return seen


@pytest.mark.parametrize("wrap", [lambda env: env, FullyObsWrapper])
@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-5x5-v0", FETCH, "MiniGrid-LavaGapS5-v0"])
def test_observations_are_of_their_space(env_id: str, wrap: Any) -> None:
    env = Categories(wrap(gym.make(env_id)))
    for observation in walks(env, 200):
        assert observation in env.observation_space


def test_an_image_is_encoded_as_minigrid_does() -> None:
    """One-hot, object and colour in front of the state."""
    env, reference = gym.make("MiniGrid-DoorKey-5x5-v0"), gym.make("MiniGrid-DoorKey-5x5-v0")
    space = Categories(env).observation_space
    encode = FlatObservations(space, [("image",)])
    for observation, expected in zip(
        walks(Categories(env), 100), walks(OneHotPartialObsWrapper(reference), 100), strict=True
    ):
        encoded = encode({"image": torch.from_numpy(observation["image"])[None]}, torch.float32)
        # MiniGrid counts three states, here there is a fourth: the directions of an agent that is seen.
        assert np.array_equal(encoded.reshape(7, 7, 21)[..., :20], expected["image"])
        assert encoded.sum() == 7 * 7 * 3


def test_a_mission_has_a_number_of_its_own() -> None:
    env = Categories(gym.make(FETCH))
    assert env.observation_space["mission"].n == 5 * 6 * 2  # type: ignore[index]
    numbers: dict[str, set[int]] = {}
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        numbers.setdefault(env.unwrapped.mission, set()).add(observation["mission"])  # type: ignore[attr-defined]
    assert len(numbers) > 10
    assert all(len(found) == 1 for found in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)


def test_the_only_mission_there_is_is_left_out() -> None:
    env = Categories(gym.make("MiniGrid-Empty-5x5-v0"))
    assert set(env.reset(seed=0)[0]) == {"image", "direction"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v1", "wrappers do not fit env CartPole-v1: Categories is for MiniGrid's observations"),
        ("minigrid:BabyAI-GoToObj-v0", "cannot count the missions of BabyAIMissionSpace"),
    ],
)
def test_what_it_cannot_read_is_named(env: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_vector_env(env, 2, wrappers=[Categories])


@pytest.mark.slow
def test_a_room_is_crossed_after_training() -> None:
    torch.manual_seed(1)
    data = RolloutDataModule(
        "minigrid:MiniGrid-Empty-5x5-v0",
        num_envs=16,
        horizon=64,
        total_timesteps=16_000,
        eval_episodes=16,
        wrappers=[Categories],
    )
    model = PPO()
    for _ in iterations(Fabric(accelerator="cpu", devices=1), model, data):
        pass
    returns = data.evaluate(model.policy).returns
    data.close()
    # The shortest way returns 0.955; random actions 0.2.
    assert returns.mean() > 0.9
