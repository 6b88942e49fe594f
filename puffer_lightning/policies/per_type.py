"""A policy for each type of agent."""

from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.policies.action_head import ActionHead, Actions
from puffer_lightning.policies.base import Policy, State
from puffer_lightning.policies.masking import unmasked
from puffer_lightning.policies.normalization import Normalizer, ObservationNormalizer

AGENT_TYPE = "agent_type"
"""Key of the number of the agent's type in the observations of environments that want a policy for each."""

MakePolicy = Callable[[gym.Space[Any], gym.Space[Any]], Policy]


def has_types(observation_space: gym.Space[Any]) -> bool:
    """Whether an environment wants a policy for each type of agent."""
    return isinstance(observation_space, spaces.Dict) and AGENT_TYPE in observation_space.spaces


def make_policies(
    make: MakePolicy, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> Policy:
    """Make one policy, or one for each type of agent if the spaces say so.

    Args:
        make: makes a policy for an observation and an action space.
        observation_space: the observation space of one environment, or row.
        action_space: its action space.
    """
    if has_types(observation_space):
        return PerTypePolicy(make, observation_space, action_space)
    return make(observation_space, action_space)


def make_normalizer(observation_space: gym.Space[Any]) -> Normalizer:
    """Make the normaliser of an observation space; statistics are of each type of agent by itself.

    Raises:
        ConfigurationError: if no part of the space, or of a type's, can be normalised.
    """
    if has_types(observation_space):
        return PerTypeNormalizer(observation_space)
    return ObservationNormalizer(observation_space)


class PerTypePolicy(Policy):
    """A policy for each type of agent; the observations say whose turn it is.

    Each row is evaluated by all K policies, and the one of its type is selected: K times the work, but
    nothing waits for the device to say which rows are whose, and no rank's gradients lack a policy that none
    of its rows is of. What the others made of the row has gradient 0.

    Args:
        make: makes the policy of one type for its spaces.
        observation_space: a Dict of the number of the ``agent_type`` and an observation space for each type.
        action_space: a Dict of an action space for each type.
    """

    head: "PerTypeHead"

    def __init__(
        self, make: MakePolicy, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__()
        assert isinstance(observation_space, spaces.Dict)
        assert isinstance(action_space, spaces.Dict)
        self.types = tuple(action_space.spaces)
        self.policies = nn.ModuleList(
            make(observation_space[name], action_space[name]) for name in self.types
        )
        self.head = PerTypeHead({name: policy.head for name, policy in self._each()})

    def _each(self) -> list[tuple[str, Policy]]:
        return list(zip(self.types, cast(list[Policy], list(self.policies)), strict=True))

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        """Return the distribution parameters of all types, the values of the rows' own, and all states.

        Args:
            observations: a batch of observations, leading dimension B.
            state: the states of the types' policies before the step.
        """
        states = state or ((),) * len(self.types)
        seen = [
            policy(observations[name], of) for (name, policy), of in zip(self._each(), states, strict=True)
        ]
        params, values, states = zip(*seen, strict=True)
        number = observations[AGENT_TYPE]
        return self.head.join(number, params), _own(number, values), states

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        """Return the states of all types' policies at the start of an episode."""
        return tuple(policy.initial_state(num_envs, device) for _, policy in self._each())

    def restart(self, state: State, started: Tensor) -> State:
        """Return the states, put back to their beginning where an episode begins: see ``Policy.restart``."""
        return tuple(policy.restart(of, started) for (_, policy), of in zip(self._each(), state, strict=True))


class PerTypeHead(ActionHead):
    """The action heads of all types, of which each row follows its own type's.

    Parameters are the number of the type, then those of all heads, side by side. Actions are a dictionary of
    those of all types. Log-probabilities and entropies are those of the row's own type alone.

    Args:
        heads: the head of each type; the types' policies own them.
    """

    def __init__(self, heads: dict[str, ActionHead]) -> None:
        each = heads.values()
        super().__init__(
            num_params=1 + sum(head.num_params for head in each),
            noise_size=sum(head.noise_size for head in each),
            num_choices=sum(head.num_choices for head in each),
        )
        # A dictionary, and not modules of this one: their parameters would be listed twice.
        self._heads = heads

    def forward(self, features: Tensor) -> Tensor:
        """Not to be called: each type's policy calls its own head."""
        raise AssertionError("the heads of different types have different features")

    def join(self, number: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return parameters ``[B, P]`` from the rows' types ``[B]`` and the parameters of each head."""
        return torch.cat((number.unsqueeze(-1).to(params[0].dtype), *params), -1)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill each head's share of ``noise``: see ``ActionHead.fill_noise``."""
        for head, share in zip(self._heads.values(), self._noise_shares(noise), strict=True):
            head.fill_noise(share, generator)

    def empty_actions(self, *leading: int, device: torch.device | str | None = None) -> Actions:
        """Return zeros for each type: see ``ActionHead.empty_actions``."""
        return {name: head.empty_actions(*leading, device=device) for name, head in self._heads.items()}

    def mask(self, params: Tensor, action_mask: Tensor) -> Tensor:
        """Mask the heads that have discrete factors: see ``ActionHead.mask``."""
        number, shares = self._shares(params)
        masks = action_mask.split_with_sizes([head.num_choices for head in self._heads.values()], -1)
        masked = [
            head.mask(share, mask) if head.num_choices else share
            for head, share, mask in zip(self._heads.values(), shares, masks, strict=True)
        ]
        return self.join(number, tuple(masked))

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Actions, Tensor]:
        """Sample for each type: see ``ActionHead.sample``."""
        number, shares = self._shares(params)
        sampled = [
            head.sample(share, of_head)
            for head, share, of_head in zip(
                self._heads.values(), shares, self._noise_shares(noise), strict=True
            )
        ]
        actions, log_probs = zip(*sampled, strict=True)
        return self._by_name(actions), _own(number, log_probs)

    def mode(self, params: Tensor) -> Actions:
        """Return the greedy actions of each type."""
        _, shares = self._shares(params)
        return self._by_name(
            tuple(head.mode(share) for head, share in zip(self._heads.values(), shares, strict=True))
        )

    def evaluate(self, params: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the rows' own types: see ``ActionHead.evaluate``."""
        number, shares = self._shares(params)
        evaluated = [
            head.evaluate(share, actions[name])
            for (name, head), share in zip(self._heads.items(), shares, strict=True)
        ]
        log_probs, entropies = zip(*evaluated, strict=True)
        return _own(number, log_probs), _own(number, entropies)

    def to_env(self, actions: Actions) -> Actions:
        """Turn the actions of each type into members of its space."""
        return {name: head.to_env(actions[name]) for name, head in self._heads.items()}

    def _by_name(self, parts: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._heads, parts, strict=True))

    def _shares(self, params: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        sizes = [1, *(head.num_params for head in self._heads.values())]
        number, *shares = params.split_with_sizes(sizes, -1)
        return number.squeeze(-1).long(), tuple(shares)

    def _noise_shares(self, noise: Tensor) -> tuple[Tensor, ...]:
        return noise.split_with_sizes([head.noise_size for head in self._heads.values()], -1)


class PerTypeNormalizer(Normalizer):
    """An ``ObservationNormalizer`` for each type, of what its own agents observe.

    Args:
        space: a Dict of the number of the ``agent_type`` and an observation space for each type.

    Raises:
        ConfigurationError: if no part of a type's space can be normalised.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        assert isinstance(space, spaces.Dict)
        self.types = tuple(name for name in space.spaces if name != AGENT_TYPE)
        self.normalizers = nn.ModuleList(ObservationNormalizer(space[name]) for name in self.types)

    def forward(self, observations: Any) -> Any:
        """Return the observations, any leading dimensions, nested as they came."""
        normalized = {
            name: normalizer(observations[name])
            for name, normalizer in zip(self.types, self.normalizers, strict=True)
        }
        return {AGENT_TYPE: observations[AGENT_TYPE], **normalized}

    @torch.no_grad()
    def update(self, observations: Any, valid: Tensor) -> None:
        """Take in the observations of a rollout, of all ranks: see ``Normalizer.update``."""
        seen = unmasked(observations)
        each = zip(self.types, cast(list[ObservationNormalizer], list(self.normalizers)), strict=True)
        for number, (name, normalizer) in enumerate(each):
            normalizer.update(seen[name], valid & (seen[AGENT_TYPE] == number))


def _own(number: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """Select each row's own of the types' ``[...]``."""
    return torch.stack(parts).gather(0, number.unsqueeze(0)).squeeze(0)
