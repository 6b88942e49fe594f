"""CleanRL's PPO, written down from its published settings and the details listed with it.

Sources: Huang et al. 2022, "CleanRL", JMLR 23(274); Huang et al. 2022, "The 37 Implementation Details of
Proximal Policy Optimization", ICLR blog track. Orthogonal initialisation with gains √2, 0.01 (actor) and 1
(critic), Adam with ε = 1e-5, learning rate annealed to 0, advantages normalised within each minibatch,
clipped value loss, environments in a ``SyncVectorEnv`` that reset within the step, an episode's end
bootstrapped from 0 whether it was terminated or truncated. Indexing, NumPy's shuffling and
``torch.distributions`` are as there.
"""

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from sides.clock import Clock, SolveClock
from sides.work import ROWS, Work

# What its ppo.py trains CartPole-v1 for.
_PUBLISHED_STEPS = 500_000


def make_envs(work: Work) -> SyncVectorEnv:
    """The environments as CleanRL makes them, Atari games with its wrappers."""

    def make() -> gym.Env[Any, Any]:
        if not work.env.startswith("ale_py:"):
            return gym.wrappers.RecordEpisodeStatistics(gym.make(work.env))
        env = gym.make(work.env, frameskip=1, repeat_action_probability=0.0)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
        env = gym.wrappers.TransformReward(env, lambda reward: float(np.sign(reward)))
        return gym.wrappers.FrameStackObservation(env, 4)

    return SyncVectorEnv([make] * work.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    def __init__(self, work: Work, envs: SyncVectorEnv) -> None:
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        actions = int(envs.single_action_space.n)
        self.scale = 1.0
        if work.network == "nature":
            self.scale = 1 / 255
            self.body = nn.Sequential(
                layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
                layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
                layer(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
                nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
            )  # fmt: skip
            self.actor, self.critic = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.body = nn.Identity()
            self.actor = self._mlp(inputs, work.hidden_sizes, actions, 0.01)
            self.critic = self._mlp(inputs, work.hidden_sizes, 1, 1.0)

    @staticmethod
    def _mlp(inputs: int, hidden_sizes: tuple[int, ...], outputs: int, gain: float) -> nn.Sequential:
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [layer(nn.Linear(inputs, size)), nn.Tanh()]
            inputs = size
        return nn.Sequential(*layers, layer(nn.Linear(inputs, outputs), gain))

    def _see(self, observations: Tensor) -> Tensor:
        return self.body(observations if self.scale == 1.0 else observations * self.scale)

    def value(self, observations: Tensor) -> Tensor:
        return self.critic(self._see(observations))

    def decide(
        self, observations: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        features = self._see(observations)
        distribution = Categorical(logits=self.actor(features))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(features)


class _Run:
    def __init__(self, work: Work, seed: int) -> None:
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.work, self.envs = work, make_envs(work)
        self.agent = Agent(work, self.envs)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=work.learning_rate, eps=1e-5)
        shape = (work.horizon, work.num_envs)
        self.observations = torch.zeros(shape + self.envs.single_observation_space.shape)
        self.actions = torch.zeros(shape)
        self.log_probs, self.rewards = torch.zeros(shape), torch.zeros(shape)
        self.dones, self.values = torch.zeros(shape), torch.zeros(shape)
        self.next_observation = torch.tensor(self.envs.reset(seed=seed)[0], dtype=torch.float32)
        self.next_done = torch.zeros(work.num_envs)
        self.returns: deque[float] = deque(maxlen=100)
        self.episodes = 0

    def iterate(self) -> None:
        self._collect()
        self._update(*self._estimate())

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def _collect(self) -> None:
        for t in range(self.work.horizon):
            self.observations[t] = self.next_observation
            self.dones[t] = self.next_done
            with torch.no_grad():
                action, log_prob, _, value = self.agent.decide(self.next_observation)
            self.values[t] = value.flatten()
            self.actions[t], self.log_probs[t] = action, log_prob
            observation, reward, terminated, truncated, infos = self.envs.step(action.numpy())
            self.rewards[t] = torch.tensor(reward).view(-1)
            self.next_observation = torch.tensor(observation, dtype=torch.float32)
            self.next_done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
            if "final_info" in infos:
                ended = infos["final_info"]["_episode"]
                self.returns.extend(infos["final_info"]["episode"]["r"][ended].tolist())
                self.episodes += int(ended.sum())

    @torch.no_grad()
    def _estimate(self) -> tuple[Tensor, Tensor]:
        work, advantages = self.work, torch.zeros_like(self.rewards)
        next_value, last, done = self.agent.value(self.next_observation).view(-1), 0.0, self.next_done
        for t in reversed(range(work.horizon)):
            delta = self.rewards[t] + work.gamma * next_value * (1 - done) - self.values[t]
            advantages[t] = last = delta + work.gamma * work.gae_lambda * (1 - done) * last
            next_value, done = self.values[t], self.dones[t]
        return advantages, advantages + self.values

    def _update(self, advantages: Tensor, returns: Tensor) -> None:
        work = self.work
        observations = self.observations.reshape((-1, *self.envs.single_observation_space.shape))
        log_probs, actions = self.log_probs.reshape(-1), self.actions.reshape(-1)
        advantages, returns, values = advantages.reshape(-1), returns.reshape(-1), self.values.reshape(-1)
        order, clip_fractions = np.arange(work.steps), []
        for _ in range(work.update_epochs):
            np.random.shuffle(order)
            for begin in range(0, work.steps, work.minibatch):
                rows = order[begin : begin + work.minibatch]
                _, new_log_probs, entropy, new_values = self.agent.decide(observations[rows], actions[rows])
                log_ratio = new_log_probs - log_probs[rows]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - log_ratio).mean()
                    clip_fractions.append(((ratio - 1).abs() > work.clip_coef).float().mean().item())
                weights = advantages[rows]
                weights = (weights - weights.mean()) / (weights.std() + 1e-8)
                clipped = ratio.clamp(1 - work.clip_coef, 1 + work.clip_coef)
                policy_loss = torch.max(-weights * ratio, -weights * clipped).mean()
                new_values, old = new_values.view(-1), values[rows]
                value_loss = (new_values - returns[rows]) ** 2
                if work.clip_value_loss:
                    held = old + (new_values - old).clamp(-work.clip_coef, work.clip_coef)
                    value_loss = torch.max(value_loss, (held - returns[rows]) ** 2)
                loss = policy_loss - work.ent_coef * entropy.mean() + work.vf_coef * 0.5 * value_loss.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), work.max_grad_norm)
                self.optimizer.step()
        # Read once an iteration, to be logged, with the losses of the last minibatch.
        self.logged = [loss.item(), approx_kl.item(), float(np.mean(clip_fractions))]


def run(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train as the work says."""
    clock, training = Clock(work, threads), _Run(work, seed)
    while not clock.tick():
        training.iterate()
    return clock.result(training.mean_return)


def solve(seed: int) -> dict[str, float | None]:
    """Train CartPole-v1 with CleanRL's own settings until it is solved."""
    torch.set_num_threads(1)
    work, clock = ROWS["small"].work, SolveClock(_PUBLISHED_STEPS)
    training, steps = _Run(work, seed), 0
    clock.begin()
    while not clock.over(steps, training.episodes, lambda: training.mean_return):
        training.optimizer.param_groups[0]["lr"] = work.learning_rate * (1 - steps / _PUBLISHED_STEPS)
        training.iterate()
        steps += work.steps
    return clock.outcome
