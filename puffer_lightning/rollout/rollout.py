"""The tensors of one rollout."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass
class Rollout:
    """``horizon`` T steps of ``num_envs`` N environments, time-major.

    The :class:`~puffer_lightning.rollout.Collector` allocates it once and overwrites it with each rollout.

    Attributes:
        observations: Pytree of tensors [T, N, ...] in the observation space's dtypes: what the policy saw;
            :class:`~puffer_lightning.policies.MaskedObservations` of such where actions are masked.
        actions: Tensor [T, N, ...], or a pytree of them for Dict and Tuple action spaces, as the policy's
            head stores them.
        log_probs: [T, N] log-probability of ``actions`` when they were sampled.
        values: [T, N] V(observations).
        next_values: [T, N] V of the observation the step led to: the *final* one where the episode ended
            there, not the first of the next episode. Meaningless where ``terminated``.
        rewards: [T, N], never clamped.
        terminated: [T, N] bool, the environment reached a terminal state.
        truncated: [T, N] bool, the episode was cut off (a time limit) and would have gone on.
        valid: [T, N] bool, False on reset steps of NEXT_STEP environments, whose action was ignored; no
            loss and no statistic may count those rows.
        started: [T, N] bool, the observation after the step is the first of an episode, so the policy's state
            was put back to its beginning before it.
        state: Pytree of tensors [N, ...], the policy's state before the first step; ``()`` for policies
            without memory.
        episode_returns: [K] undiscounted returns of the episodes that ended during this rollout.
        episode_lengths: [K] their lengths in environment steps.
        episode_rows: [K] int64, whose they were: columns of the [T, N] above.
        agent_types: [A], names of the types of agents, if the environment tells: row i is of type i mod A.
        began: When its collection began, by ``time.perf_counter``.
        seconds: Wall-clock time it took to collect.
        preempted_at: Steps after which this rank was told to stop; None if it made all T. The rows that it
            did not make are not ``valid``, and all is 0 there but observations, actions and log_probs.
    """

    observations: Any
    actions: Any
    log_probs: Tensor
    values: Tensor
    next_values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    started: Tensor
    state: Any = ()
    episode_returns: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    episode_lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    episode_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    agent_types: tuple[str, ...] = ()
    began: float = 0.0
    seconds: float = 0.0
    preempted_at: int | None = None

    @property
    def horizon(self) -> int:
        """T, steps of each environment."""
        return self.rewards.shape[0]

    @property
    def num_envs(self) -> int:
        """N, environments."""
        return self.rewards.shape[1]

    @property
    def made(self) -> int:
        """Steps of each environment that were made: T, or fewer if the rank was preempted."""
        return self.horizon if self.preempted_at is None else self.preempted_at

    @property
    def num_steps(self) -> int:
        """Environment steps that were made; reset steps count, since the environments made them."""
        return self.made * self.num_envs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rollout:
        """The rollout on ``device``; Lightning calls this, and it costs nothing when it is there."""
        device = torch.device(device)
        if self.rewards.device == device:
            return self

        def move(value: Any) -> Any:
            return tree_map(
                lambda leaf: leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, Tensor) else leaf,
                value,
            )

        return replace(self, **{entry.name: move(getattr(self, entry.name)) for entry in fields(self)})
