"""What a policy is: an actor-critic that acts, evaluates and values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from puffer_lightning.distributed import Sharding, Split, gathered
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies.action_head import ActionHead, Actions
from puffer_lightning.policies.masking import MaskedObservations
from puffer_lightning.policies.normalization import Normalizer, RewardNormalizer

Observations = Any
"""A tensor or a pytree of tensors, leading dimension B; ``MaskedObservations`` where actions are masked."""
State = Any
"""What a policy remembers between steps: a pytree of tensors with leading dimension N; ``()`` if nothing."""
Part = Literal["actor", "critic"]
"""What is asked for of a policy whose actor and critic share nothing."""


class Action(NamedTuple):
    """What ``Policy.act`` gives, for N environments."""

    actions: Actions
    """Leading dimension N, to be stored; ``policy.head.to_env`` makes them fit for the environments."""
    log_probs: Tensor
    """``[N]`` float32."""
    values: Tensor
    """``[N]`` float32; ``[0]`` if they were left out."""
    state: State
    """The policy's state after the step."""


class Evaluation(NamedTuple):
    """What ``Policy.evaluate`` gives, for B transitions or for N sequences of T of them."""

    log_probs: Tensor
    """``[B]`` or ``[T, N]``, float32."""
    entropies: Tensor
    """Likewise, in nats."""
    values: Tensor
    """Likewise."""


class Policy(nn.Module, ABC):
    """An actor-critic.

    A subclass builds ``self.head`` in its ``__init__`` and implements ``forward``; every trainable parameter
    lives inside the module. All other methods call the module itself, not ``forward``, so that the hooks of
    wrappers (FSDP) run. None of them turns gradients off: the caller does, for a rollout.

    Action masks and normalisation are the concern of these methods, not of ``forward``: they take the mask
    off the observations, normalise them, and apply the mask to the parameters.

    Attributes:
        head: the action head.
        separate_critic: whether ``forward`` takes a ``part`` and computes that alone, with a tensor ``[0]``
            for what belongs to the other. A rollout's values are then computed after it, in large batches.
        observation_normalizer: normalises what ``forward`` is given, if not None.
        reward_normalizer: scales the rewards that the policy is trained on, if not None; kept with the policy
            because the values are in its units.
        autocast: dtype that ``forward`` computes in where autocasting thinks it safe, if not None; in every
            method alike, so that the update finds what acting found.
        sharding: how the parameters are sharded over ranks, if they are.
        offloaded_from: device that ``forward`` computes on, if the parameters are kept elsewhere meanwhile.
    """

    head: ActionHead
    separate_critic = False
    observation_normalizer: Normalizer | None
    reward_normalizer: RewardNormalizer | None

    def __init__(self) -> None:
        super().__init__()
        self.observation_normalizer = None
        self.reward_normalizer = None
        self.autocast: torch.dtype | None = None
        self.sharding: Sharding | None = None
        self.offloaded_from: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return self.offloaded_from or next(self.parameters()).device

    @abstractmethod
    def forward(self, observations: Observations, state: State = ()) -> tuple[Tensor, Tensor, State]:
        """Return what all else follows from.

        Args:
            observations: a batch of observations, leading dimension B, normalised and without an
                action mask.
            state: the state before the step.

        Returns:
            Distribution parameters ``[B, P]`` of ``self.head``, values ``[B]`` and the next state.
        """

    def acting(self, uneven: bool = False) -> AbstractContextManager[object]:
        """Return the context of many steps without gradients: sharded parameters are gathered once.

        Args:
            uneven: the number of steps may differ between ranks, so none may need all of them.
        """
        if self.sharding is None or not (uneven or self.sharding.unshard_for_rollout):
            return nullcontext()
        return gathered(self, self.sharding)

    def shards(self) -> Sequence[nn.Module]:
        """Return the modules within it that are large enough to be sharded each by itself."""
        return ()

    def split(self, size: int) -> Mapping[str, Split]:
        """Prepare for linear layers that are divided among ``size`` ranks, and return which and how.

        Raises:
            ConfigurationError: if it has none that can be.
        """
        raise ConfigurationError(
            f"tensor_parallel_size {size} needs layers that can be divided, and {type(self).__name__} has "
            "none: set it to 1, or model.policy to TransformerPolicy."
        )

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        """Return the state at the start of an episode, for ``num_envs`` environments."""
        return ()

    def restart(self, state: State, started: Tensor) -> State:
        """Return the state with its beginning put back where an episode begins.

        Args:
            state: the state after a step.
            started: ``[N]`` bool, the next observation is the first of an episode.
        """
        if not tree_leaves(state):
            return state

        def at_start(now: Tensor, initial: Tensor) -> Tensor:
            return torch.where(started.view(-1, *[1] * (now.ndim - 1)), initial, now)

        return tree_map(at_start, state, self.initial_state(started.shape[0], started.device))

    def act(
        self, observations: Observations, noise: Tensor, state: State = (), values: bool = True
    ) -> Action:
        """Sample actions.

        Args:
            observations: observations, leading dimension N.
            noise: ``[N, head.noise_size]``, as ``head.fill_noise`` left it.
            state: the state before the step.
            values: whether the values are needed; only a ``separate_critic`` can leave them out.
        """
        params, of_critic, next_state = self._see(observations, state, part=None if values else "actor")
        actions, log_probs = self.head.sample(params, noise)
        return Action(actions, log_probs, of_critic.float(), next_state)

    def greedy(self, observations: Observations, state: State = ()) -> tuple[Actions, State]:
        """Return the distribution's modes, to be stored, leading dimension N, and the next state."""
        params, _, next_state = self._see(observations, state, part="actor")
        return self.head.mode(params), next_state

    def unroll(self, observations: Observations, state: State, started: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``forward`` gives along sequences, as acting step by step would.

        A subclass may do better than one step after the other; for the sake of hooks in one call of itself.

        Args:
            observations: observations, leading dimensions T and N.
            state: the state before the first step.
            started: ``[T, N]`` bool, the observation after the step is the first of an episode.

        Returns:
            Distribution parameters ``[T, N, P]`` and values ``[T, N]``.
        """
        params, values = [], []
        for t, starts in enumerate(started):
            now = tree_map(lambda leaf, t=t: leaf[t], observations)
            of_step, value, state = self(now, state)
            state = self.restart(state, starts)
            params.append(of_step)
            values.append(value)
        return torch.stack(params), torch.stack(values)

    def evaluate(
        self,
        observations: Observations,
        actions: Actions,
        state: State = (),
        started: Tensor | None = None,
    ) -> Evaluation:
        """Return log-probabilities, entropies and values of stored transitions, or sequences of them.

        Args:
            observations: observations, leading dimension B; for sequences leading dimensions T and N.
            actions: stored actions, likewise.
            state: the state before the step, or before the first one.
            started: for sequences, see ``unroll``.
        """
        params, values, _ = self._see(observations, state, started)
        log_probs, entropies = self.head.evaluate(params, actions)
        return Evaluation(log_probs, entropies, values.float())

    def value(self, observations: Observations, state: State = ()) -> Tensor:
        """Return the values ``[B]``, float32."""
        values: Tensor = self._see(observations, state, part="critic")[1]
        return values.float()

    def _see(
        self,
        observations: Observations,
        state: State,
        started: Tensor | None = None,
        part: Part | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        action_mask = None
        if isinstance(observations, MaskedObservations):
            observations, action_mask = observations
        if self.observation_normalizer is not None:
            observations = self.observation_normalizer(observations)
        next_state: State = ()
        # Without its cache, so that the gradients of a weight that is used at every step add up in float32.
        with (
            nullcontext()
            if self.autocast is None
            else torch.autocast(self.device.type, self.autocast, cache_enabled=False)
        ):
            if started is None:
                chosen = {"part": part} if self.separate_critic else {}
                params, values, next_state = self(observations, state, **chosen)
            else:
                params, values = self.unroll(observations, state, started)
        if action_mask is not None and part != "critic":
            params = self.head.mask(params, action_mask)
        return params, values, next_state
