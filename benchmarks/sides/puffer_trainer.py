"""PufferLib 3.0's own trainer, on its CartPole in C; in the Python of an environment that has the package.

What it trains and how much of it is the row's: network, sizes, Adam, a constant learning rate and
coefficients. The rest is as its configuration has it: a dashboard four times a second, metrics read for each
minibatch, segments drawn by the size of their advantages, advantages twice a minibatch.

Its CartPole ends after 200 steps instead of 500, and begins nearer to the middle. It is stepped in this
process: on two busy cores that gave 66 to 205 thousand steps a second, its two or four batches of
environments in two workers 38 to 51.
"""

import contextlib
import io
import math
import sys
from typing import Any

import pufferlib.models
import pufferlib.vector
import torch
from pufferlib import pufferl
from pufferlib.ocean.cartpole.cartpole import Cartpole
from torch import nn

from sides.clock import Clock
from sides.work import Work

assert pufferlib.__version__ == 3.0, "the side's name is another release's"

_ENV = "puffer_cartpole"


def config(work: Work, seed: int, iterations: int) -> dict[str, Any]:
    """The work in words of its configuration."""
    # Where it looks for options of its own.
    sys.argv = ["puffer"]
    return pufferl.load_config(_ENV)["train"] | {
        "env": _ENV,
        "seed": seed,
        "device": "cpu",
        "use_rnn": work.network == "lstm",
        "total_timesteps": iterations * work.steps,
        "bptt_horizon": work.horizon,
        "minibatch_size": work.minibatch,
        "update_epochs": work.update_epochs,
        "optimizer": "adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-5,
        "anneal_lr": False,
        "learning_rate": work.learning_rate,
        "gamma": work.gamma,
        "gae_lambda": work.gae_lambda,
        "clip_coef": work.clip_coef,
        "vf_clip_coef": work.clip_coef,
        "vf_coef": work.vf_coef,
        "ent_coef": work.ent_coef,
        "max_grad_norm": work.max_grad_norm,
    }


def make_trainer(work: Work, seed: int, iterations: int) -> pufferl.PuffeRL:
    # Its native vectorisation has no sizes that the LSTM asks for.
    backend = "Serial" if work.network == "lstm" else "PufferEnv"
    envs = pufferlib.vector.make(Cartpole, env_kwargs={"num_envs": work.num_envs}, backend=backend)
    size = work.hidden_sizes[0]
    policy = pufferlib.models.Default(envs.driver_env, hidden_size=size)
    # Its GELU takes as long as tanh.
    policy.encoder[1] = {"tanh": nn.Tanh, "relu": nn.ReLU}[work.activation]()
    if work.network == "lstm":
        policy = pufferlib.models.LSTMWrapper(envs.driver_env, policy, size, size)
    return pufferl.PuffeRL(config(work, seed, iterations), envs, policy)


def run(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train as the work says."""
    torch.manual_seed(seed)
    clock = Clock(work, threads)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(work, seed, clock.total)
        while not clock.tick():
            stats = trainer.evaluate()
            # Taken now, as training replaces them by their means.
            scores, episodes = stats["score"], stats["n"]
            trainer.train()
        trainer.close()
    total = sum(score * number for score, number in zip(scores, episodes, strict=True))
    return clock.result(total / sum(episodes) if episodes else math.nan)
