"""A policy that remembers by a recurrent network."""

from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from puffer_lightning.policies.base import Policy, State
from puffer_lightning.policies.heads import make_head
from puffer_lightning.policies.initialization import VALUE_GAIN, check_positive, make_orthogonal, orthogonal
from puffer_lightning.policies.lstm import lstm, lstm_step
from puffer_lightning.policies.mlp import in_plain_float32
from puffer_lightning.policies.multi_input import Network, make_encoder

# It remembers from the start: with it all of three seeds solved the memory maze, without it none. Source:
# Jozefowicz et al. 2015, "An Empirical Exploration of Recurrent Network Architectures", section 2.4.
_FORGET_BIAS = 1.0


class LSTMPolicy(Policy):
    """An actor and a critic that share an encoder and a long short-term memory behind it.

    Source: Hochreiter and Schmidhuber 1997 (doi:10.1162/neco.1997.9.8.1735).

    Args:
        observation_space: the observation space of one environment; images go through a CNN.
        action_space: the action space of one environment.
        encoder_size: Features that an observation is encoded in.
        hidden_size: Units of the memory.
        network: Convolutional network of images: that of DQN ("nature") or the residual one of IMPALA
            ("impala").
        squash_actions: Squash the actions of Box spaces by tanh to their bounds, instead of clipping them.
        log_std_init: Initial logarithm of the standard deviation of the actions of Box spaces.

    Raises:
        ConfigurationError: if a space is not supported, or an option does not fit.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        encoder_size: int = 64,
        hidden_size: int = 64,
        network: Network = "nature",
        squash_actions: bool = False,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive("encoder_size", encoder_size)
        check_positive("hidden_size", hidden_size)
        self.encoder = make_encoder(observation_space, encoder_size, network)
        self.memory = nn.LSTMCell(encoder_size, hidden_size)
        for weight in (self.memory.weight_ih, self.memory.weight_hh):
            make_orthogonal(weight, gain=1.0)
        for bias in (self.memory.bias_ih, self.memory.bias_hh):
            nn.init.zeros_(bias)
        with torch.no_grad():
            # The gates' biases are side by side: input, forget, cell, output.
            self.memory.bias_ih.chunk(4)[1].fill_(_FORGET_BIAS)
        self.head = make_head(hidden_size, action_space, squash_actions, log_std_init)
        self.critic = orthogonal(nn.Linear(hidden_size, 1), VALUE_GAIN)

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        """Return zeros: output and cell ``[num_envs, hidden_size]`` of the memory."""
        zeros = torch.zeros(num_envs, self.memory.hidden_size, dtype=self.critic.weight.dtype, device=device)
        return zeros, zeros

    def restart(self, state: State, started: Tensor) -> State:
        """Return the state with zeros where an episode begins: see ``Policy.restart``."""
        output, cell = state
        if started.device.type == "cpu":
            # A third of a mask's time; elsewhere the number of rows would have to be waited for.
            rows = started.nonzero().squeeze(-1)
            return output.index_fill(0, rows, 0.0), cell.index_fill(0, rows, 0.0)
        begins = started.unsqueeze(-1)
        return output.masked_fill(begins, 0.0), cell.masked_fill(begins, 0.0)

    def forward(
        self, observations: Any, state: State = (), started: Tensor | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """Return distribution parameters, values and the next state, of one step or along sequences.

        Args:
            observations: a batch of observations, leading dimension N; of sequences T and N.
            state: output and cell of the memory before the first step.
            started: ``[T, N]`` bool for sequences, see ``Policy.unroll``.
        """
        if started is None:
            state = self._step(self.encoder(observations), state)
            outputs: Tensor = state[0]
        else:
            flat = tree_map(lambda leaf: leaf.flatten(0, 1), observations)
            features = self.encoder(flat).unflatten(0, started.shape)
            outputs, state = self._steps(features, state, started)
        return self.head(outputs), self.critic(outputs).squeeze(-1), state

    def _step(self, features: Tensor, state: State) -> State:
        if not torch.is_grad_enabled() and in_plain_float32(features):
            return lstm_step(features, state, self._parameters_of_memory())
        next_state: State = self.memory(features, state)
        return next_state

    def _steps(self, features: Tensor, state: State, started: Tensor) -> tuple[Tensor, State]:
        if in_plain_float32(features):
            return lstm(features, state, started, self._parameters_of_memory())
        outputs = []
        for feature, begins in zip(features.unbind(), started.unbind(), strict=True):
            state = self.memory(feature, state)
            outputs.append(state[0])
            state = self.restart(state, begins)
        return torch.stack(outputs), state

    def _parameters_of_memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        memory = self.memory
        return memory.weight_ih, memory.weight_hh, memory.bias_ih, memory.bias_hh

    def unroll(self, observations: Any, state: State, started: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``forward`` gives along sequences: see ``Policy.unroll``."""
        params, values, _ = self(observations, state, started)
        return params, values
