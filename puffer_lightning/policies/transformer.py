"""A policy that remembers by attending to the steps it has just made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils._pytree import tree_map

from puffer_lightning.distributed import Split
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.base import Policy, State
from puffer_lightning.policies.heads import make_head
from puffer_lightning.policies.initialization import VALUE_GAIN, check_positive, orthogonal
from puffer_lightning.policies.multi_input import Network, make_encoder

_SLOWEST_TURN = 10_000.0


class TransformerPolicy(Policy):
    """An actor and a critic that share an encoder and a causal, pre-norm transformer behind it.

    A step attends to itself and to the ``context`` − 1 steps before it, as far as they are of its episode; a
    rollout's beginning does not cut that off. The state holds what the blocks need of those steps, their keys
    and values, so acting computes each step once. As with any memory, what an update sees of the steps
    before its rollout is what the policy made of them then.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), with the normalisation before each layer (Xiong et al.
    2020, arXiv:2002.04745) and rotary positions (Su et al. 2021, arXiv:2104.09864), which depend on how far
    two steps are apart and on nothing else.

    Args:
        observation_space: the observation space of one environment; images go through a CNN.
        action_space: the action space of one environment.
        context: Steps that a step attends to, itself among them.
        num_blocks: Blocks of attention and feed-forward layers.
        num_heads: Attention heads of a block.
        hidden_size: Width of the blocks; each head has an even share of it.
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
        context: int = 32,
        num_blocks: int = 2,
        num_heads: int = 4,
        hidden_size: int = 64,
        network: Network = "nature",
        squash_actions: bool = False,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive("context", context)
        check_positive("num_blocks", num_blocks)
        check_positive("num_heads", num_heads)
        if hidden_size % (2 * num_heads):
            raise ConfigurationError(
                f"hidden_size {hidden_size} has no even share for each of num_heads {num_heads}: set it to a "
                f"multiple of {2 * num_heads}."
            )
        self.remembered = context - 1
        self.encoder = make_encoder(observation_space, hidden_size, network)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = make_head(hidden_size, action_space, squash_actions, log_std_init)
        self.critic = orthogonal(nn.Linear(hidden_size, 1), VALUE_GAIN)

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        """Return a memory of nothing.

        Returns:
            For each block keys and values ``[num_envs, context - 1, num_heads, hidden_size / num_heads]`` of
            the last steps, and ``[num_envs, context - 1]`` bool, which of them are of the episode.
        """
        dtype = self.critic.weight.dtype
        past = [
            torch.zeros(num_envs, self.remembered, of.num_heads, of.head_size, dtype=dtype, device=device)
            for of in self._attentions
        ]
        known = torch.zeros(num_envs, self.remembered, dtype=torch.bool, device=device)
        return [(zeros, zeros) for zeros in past], known

    def shards(self) -> list[nn.Module]:
        """Return the blocks."""
        return list(self.blocks)

    def split(self, size: int) -> Mapping[str, Split]:
        """Divide the heads among ranks, and so the state; the feed-forward layers, too: see ``Policy.split``.

        Raises:
            ConfigurationError: if they cannot be divided evenly.
        """
        for attention in self._attentions:
            if attention.num_heads % size:
                raise ConfigurationError(
                    f"tensor_parallel_size {size} does not divide num_heads {attention.num_heads} of the "
                    f"TransformerPolicy: set num_heads to a multiple of {size}."
                )
            attention.num_heads //= size
        apart: dict[str, Split] = {
            f"blocks.*.{name}": "outputs"
            for name in ("attention.query", "attention.key", "attention.value", "feed_forward.widen")
        }
        return apart | {"blocks.*.attention.output": "inputs", "blocks.*.feed_forward.narrow": "inputs"}

    def restart(self, state: State, started: Tensor) -> State:
        """Return the state with nothing known where an episode begins: see ``Policy.restart``."""
        past, known = state
        return past, known.masked_fill(started.unsqueeze(-1), False)

    def forward(
        self, observations: Any, state: State = (), started: Tensor | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """Return distribution parameters, values and the next state, of one step or along sequences.

        Args:
            observations: a batch of observations, leading dimension N; of sequences T and N.
            state: the state before the first step.
            started: ``[T, N]`` bool for sequences, see ``Policy.unroll``.
        """
        past, known = state
        if started is None:
            x = self.encoder(observations).unsqueeze(1)
            earlier = torch.zeros(*x.shape[:2], dtype=torch.int64, device=x.device)
        else:
            flat = tree_map(lambda leaf: leaf.flatten(0, 1), observations)
            x = self.encoder(flat).unflatten(0, started.shape).transpose(0, 1)
            earlier = (started.cumsum(0) - started.long()).transpose(0, 1)
        # Which of the sequence's episodes each step is of, those before the sequence first; -1 for unknown.
        episodes = torch.cat((known.long() - 1, earlier), 1)
        visible = self._visible(episodes)
        turns = rotations(episodes.shape[1], self._attentions[0].head_size, x.device)
        kept = []
        for block, of_block in zip(self.blocks, past, strict=True):
            x, keys, values = block(x, *of_block, visible, turns)
            kept.append((keys, values))
        x = self.norm(x)
        x = x.squeeze(1) if started is None else x.transpose(0, 1)
        known = (episodes == episodes[:, -1:])[:, episodes.shape[1] - self.remembered :]
        return self.head(x), self.critic(x).squeeze(-1), (kept, known)

    @property
    def _attentions(self) -> list[Attention]:
        return [block.attention for block in cast(list[Block], list(self.blocks))]

    def _visible(self, episodes: Tensor) -> Tensor:
        """Which steps each step attends to, ``[N, 1, T, context - 1 + T]`` bool."""
        places = torch.arange(episodes.shape[1], device=episodes.device)
        ago = places[self.remembered :, None] - places
        near = (ago >= 0) & (ago <= self.remembered)
        same = episodes[:, self.remembered :, None] == episodes[:, None]
        return (near & same).unsqueeze(1)

    def unroll(self, observations: Any, state: State, started: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``forward`` gives along sequences: see ``Policy.unroll``."""
        params, values, _ = self(observations, state, started)
        return params, values


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it is given the norm of.

    Args:
        hidden_size: width D.
        num_heads: attention heads.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads)
        self.feed_forward_norm = nn.LayerNorm(hidden_size)
        self.feed_forward = FeedForward(hidden_size)

    def forward(
        self, x: Tensor, past_keys: Tensor, past_values: Tensor, visible: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[N, T, D]`` and the keys and values to remember: see ``Attention``."""
        attended, keys, values = self.attention(
            self.attention_norm(x), past_keys, past_values, visible, turns
        )
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), keys, values


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself and to steps before it.

    Args:
        hidden_size: width D.
        num_heads: attention heads.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.query = orthogonal(nn.Linear(hidden_size, hidden_size), gain=1.0)
        self.key = orthogonal(nn.Linear(hidden_size, hidden_size), gain=1.0)
        self.value = orthogonal(nn.Linear(hidden_size, hidden_size), gain=1.0)
        self.output = orthogonal(nn.Linear(hidden_size, hidden_size), gain=1.0)

    def forward(
        self, x: Tensor, past_keys: Tensor, past_values: Tensor, visible: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend.

        Args:
            x: ``[N, T, D]``.
            past_keys: of the S steps before the first, ``[N, S, heads, D / heads]``.
            past_values: likewise.
            visible: which steps each step attends to, ``[N, 1, T, S + T]`` bool.
            turns: of ``rotations``, for all S + T places.

        Returns:
            ``[N, T, D]``, and keys and values ``[N, S, heads, D / heads]`` of the last S steps.
        """
        queries, keys, values = (
            layer(x).unflatten(-1, (self.num_heads, self.head_size))
            for layer in (self.query, self.key, self.value)
        )
        # Not rotated yet: the places in the window will be others at the next step.
        keys = torch.cat((past_keys.to(keys.dtype), keys), 1)
        values = torch.cat((past_values.to(values.dtype), values), 1)
        attended = scaled_dot_product_attention(
            rotate(queries, turns[-x.shape[1] :]).transpose(1, 2),
            rotate(keys, turns).transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible,
        )
        attended = self.output(attended.transpose(1, 2).flatten(2))
        return attended, keys[:, x.shape[1] :], values[:, x.shape[1] :]


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide between them.

    Args:
        hidden_size: width D.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.widen = orthogonal(nn.Linear(hidden_size, 4 * hidden_size))
        self.narrow = orthogonal(nn.Linear(4 * hidden_size, hidden_size), gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., D]`` for ``[..., D]``."""
        narrowed: Tensor = self.narrow(gelu(self.widen(x)))
        return narrowed


def rotations(num_places: int, size: int, device: torch.device) -> Tensor:
    """Return cosines and sines of the angles by which rotary positions turn, ``[num_places, 2, size / 2]``.

    Formula: the angle of the i-th pair of numbers at place p is p · 10000^(-2i / size).

    Args:
        num_places: places in the window.
        size: of a head's queries and keys, even.
        device: of the result.
    """
    exponents = torch.arange(0, size, 2, device=device) / size
    angles = torch.arange(num_places, device=device).unsqueeze(1) * _SLOWEST_TURN**-exponents
    return torch.stack((angles.cos(), angles.sin()), 1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn queries or keys ``[N, S, heads, size]`` by their places' angles, ``[S, 2, size / 2]``.

    The dot product of two of them then depends on their distance only (Su et al. 2021, eq. 16).
    """
    cos, sin = turns.unsqueeze(2).unbind(1)
    one, other = x.float().chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1).to(x.dtype)
