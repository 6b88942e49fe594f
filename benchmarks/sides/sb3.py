"""Stable-Baselines3, as its documentation has it."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from torch import Tensor, nn

from sides.clock import Clock, SolveClock
from sides.work import Work

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class SharedLayers(BaseFeaturesExtractor):
    """Layers that actor and critic share."""

    def __init__(
        self, observation_space: gym.Space[Any], hidden_sizes: tuple[int, ...], activation: Any
    ) -> None:
        super().__init__(observation_space, hidden_sizes[-1])
        layers: list[nn.Module] = []
        inputs = int(np.prod(observation_space.shape))
        for size in hidden_sizes:
            layers += [nn.Linear(inputs, size), activation()]
            inputs = size
        self.layers = nn.Sequential(*layers)

    def forward(self, observations: Tensor) -> Tensor:
        """Features."""
        return self.layers(observations)


class _Ticks(BaseCallback):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.over = clock, False

    def _on_rollout_start(self) -> None:
        self.over = self.clock.tick()

    def _on_step(self) -> bool:
        return not self.over


class _Solves(BaseCallback):
    def __init__(self, clock: SolveClock) -> None:
        super().__init__()
        self.clock, self.episodes = clock, 0

    def _on_training_start(self) -> None:
        self.clock.begin()

    def _on_step(self) -> bool:
        ended = int(np.sum(self.locals["dones"]))
        self.episodes += ended
        if not ended and self.num_timesteps < self.clock.limit:
            return True
        return not self.clock.over(self.num_timesteps, self.episodes, lambda: mean_return(self.model))


def mean_return(model: PPO) -> float:
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or []]))


def run(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train as the work says; LunarLander in worker processes, the rest in this one."""
    in_workers = work.env.startswith("LunarLander")
    env = make_vec_env(
        work.env,
        work.num_envs,
        seed=seed,
        vec_env_cls=SubprocVecEnv if in_workers else DummyVecEnv,
        vec_env_kwargs={"start_method": "fork"} if in_workers else None,
    )
    activation = _ACTIVATIONS[work.activation]
    network: dict[str, Any] = {"net_arch": list(work.hidden_sizes), "activation_fn": activation}
    if work.network == "shared":
        options = {"hidden_sizes": work.hidden_sizes, "activation": activation}
        network = {
            "net_arch": [],
            "features_extractor_class": SharedLayers,
            "features_extractor_kwargs": options,
        }
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=work.horizon,
        batch_size=work.minibatch,
        n_epochs=work.update_epochs,
        learning_rate=work.learning_rate,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=work.clip_coef,
        clip_range_vf=work.clip_coef if work.clip_value_loss else None,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef / 2,  # of the squared error, where the others take half of it
        max_grad_norm=work.max_grad_norm,
        policy_kwargs=network,
        seed=seed,
        device="cpu",
    )
    clock = Clock(work, threads)
    model.learn((clock.total + 1) * work.steps, callback=_Ticks(clock))
    env.close()
    return clock.result(mean_return(model))


def solve(seed: int) -> dict[str, float | None]:
    """Train CartPole-v1 with the tuned settings of its RL Zoo until it is solved."""
    torch.set_num_threads(1)
    steps = 100_000
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        seed=seed,
        device="cpu",
    )
    callback = _Solves(SolveClock(steps))
    model.learn(steps, callback=callback)
    return callback.clock.outcome
