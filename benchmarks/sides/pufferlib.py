"""A plain-torch loop of PufferLib 3.0's update, on gymnasium's vectorised environments.

Source: Suarez 2024, "PufferLib", arXiv 2406.12905, and its release 3.0: rollouts as segments [N, T], one pass
in minibatches of whole segments, GAE (its V-trace with the ratios of the one pass, all 1), rewards clipped to
±1, clipped value loss, an LSTM whose state begins at 0 with each segment and goes on over episodes' ends.

Kinder to the loop than PufferLib is to itself: advantages are computed once an iteration and not twice for
each minibatch, metrics are read once and not for each minibatch, and segments are drawn without the
priorities of its prioritised replay, so that both sides see each transition once. Adam, as on all sides, for
its Muon. Its environments are written in C; here they are the ones of the other side, which cost little
either way.
"""

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from sides.clock import Clock
from sides.work import Work


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Policy(nn.Module):
    """A hidden layer, with an LSTM behind it or not, and two heads."""

    def __init__(self, work: Work, envs: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__()
        size = work.hidden_sizes[0]
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[work.activation]
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.encoder = nn.Sequential(layer(nn.Linear(inputs, size)), activation())
        self.lstm = nn.LSTM(size, size, batch_first=True) if work.network == "lstm" else None
        self.cell = None
        if self.lstm is not None:
            # The same weights, step by step.
            self.cell = nn.LSTMCell(size, size)
            self.cell.weight_ih, self.cell.weight_hh = self.lstm.weight_ih_l0, self.lstm.weight_hh_l0
            self.cell.bias_ih, self.cell.bias_hh = self.lstm.bias_ih_l0, self.lstm.bias_hh_l0
            for weight in (self.lstm.weight_ih_l0, self.lstm.weight_hh_l0):
                nn.init.orthogonal_(weight, 1.0)
            nn.init.zeros_(self.lstm.bias_ih_l0)
            nn.init.zeros_(self.lstm.bias_hh_l0)
        self.actor = layer(nn.Linear(size, int(envs.single_action_space.n)), 0.01)
        self.critic = layer(nn.Linear(size, 1), 1.0)

    def act(self, observations: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Logits and values of one step."""
        features = self.encoder(observations)
        if self.cell is not None:
            state = self.cell(features, state)
            features = state[0]
        return self.actor(features), self.critic(features).squeeze(-1), state

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values of segments [B, T, ...]."""
        features = self.encoder(observations)
        if self.lstm is not None:
            features, _ = self.lstm(features)
        return self.actor(features), self.critic(features).squeeze(-1)


class _Run:
    def __init__(self, work: Work, seed: int) -> None:
        torch.manual_seed(seed)
        self.work = work
        self.envs = gym.make_vec(work.env, work.num_envs, vectorization_mode="vector_entry_point")
        self.policy = Policy(work, self.envs)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=work.learning_rate, eps=1e-5, fused=True
        )
        shape = (work.num_envs, work.horizon)
        self.observations = torch.zeros(shape + self.envs.single_observation_space.shape)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probs, self.values = torch.zeros(shape), torch.zeros(shape)
        self.rewards, self.terminals = torch.zeros(shape), torch.zeros(shape)
        self.observation, _ = self.envs.reset(seed=seed)
        self.running = np.zeros(work.num_envs)
        self.returns: deque[float] = deque(maxlen=100)

    def iterate(self) -> None:
        self._collect()
        self._update()

    @torch.no_grad()
    def _collect(self) -> None:
        zeros = torch.zeros(self.work.num_envs, self.work.hidden_sizes[0])
        state = (zeros, zeros) if self.policy.cell is not None else None
        for t in range(self.work.horizon):
            observation = torch.as_tensor(self.observation)
            logits, values, state = self.policy.act(observation, state)
            log_probs = log_softmax(logits, -1)
            action = torch.multinomial(log_probs.exp(), 1)
            self.observations[:, t], self.values[:, t] = observation, values
            self.actions[:, t] = action.squeeze(-1)
            self.log_probs[:, t] = log_probs.gather(-1, action).squeeze(-1)
            self.observation, rewards, terminated, truncated, _ = self.envs.step(action.squeeze(-1).numpy())
            ended = terminated | truncated
            self.rewards[:, t] = torch.as_tensor(rewards, dtype=torch.float32).clamp(-1, 1)
            self.terminals[:, t] = torch.as_tensor(ended, dtype=torch.float32)
            self.running += rewards
            if ended.any():
                self.returns.extend(self.running[ended].tolist())
                self.running[ended] = 0.0

    def _advantages(self) -> Tensor:
        # As there, the last step of a segment has none of its own.
        work, advantages, last = self.work, torch.zeros_like(self.values), 0.0
        for t in reversed(range(work.horizon - 1)):
            going_on = 1 - self.terminals[:, t]
            delta = self.rewards[:, t] + work.gamma * self.values[:, t + 1] * going_on - self.values[:, t]
            advantages[:, t] = last = delta + work.gamma * work.gae_lambda * going_on * last
        return advantages

    def _update(self) -> None:
        work, advantages = self.work, self._advantages()
        returns, logged = advantages + self.values, torch.zeros(5)
        for _ in range(work.update_epochs):
            for rows in torch.randperm(work.num_envs).chunk(work.num_minibatches):
                logits, values = self.policy(self.observations[rows])
                log_probs = log_softmax(logits, -1)
                taken = log_probs.gather(-1, self.actions[rows].unsqueeze(-1)).squeeze(-1)
                entropy = -(log_probs * log_probs.exp()).sum(-1).mean()
                log_ratio = taken - self.log_probs[rows]
                ratio = log_ratio.exp()
                weights = advantages[rows]
                weights = (weights - weights.mean()) / (weights.std() + 1e-8)
                clipped = ratio.clamp(1 - work.clip_coef, 1 + work.clip_coef)
                policy_loss = torch.max(-weights * ratio, -weights * clipped).mean()
                old, wanted = self.values[rows], returns[rows]
                value_loss = (values - wanted) ** 2
                if work.clip_value_loss:
                    held = old + (values - old).clamp(-work.clip_coef, work.clip_coef)
                    value_loss = torch.max(value_loss, (held - wanted) ** 2)
                value_loss = 0.5 * value_loss.mean()
                loss = policy_loss + work.vf_coef * value_loss - work.ent_coef * entropy
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), work.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                with torch.no_grad():
                    kl = ((ratio - 1) - log_ratio).mean()
                    clip_fraction = ((ratio - 1).abs() > work.clip_coef).float().mean()
                    logged += torch.stack((policy_loss, value_loss, entropy, kl, clip_fraction))
        self.logged = logged.tolist()


def run(work: Work, seed: int, threads: int | None) -> dict[str, float | None]:
    """Train as the work says."""
    clock, training = Clock(work, threads), _Run(work, seed)
    while not clock.tick():
        training.iterate()
    return clock.result(float(np.mean(training.returns)))
