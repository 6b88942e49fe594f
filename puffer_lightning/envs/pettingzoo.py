"""PettingZoo's parallel environments: agents as rows."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array, iterate
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from puffer_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

Array = NDArray[Any]

Policies = Literal["shared", "per_type"] | Mapping[str, str]
"""Who acts by which policy: all by one, each type by its own, or each agent by the one named here for it."""

_ACTION_MASK, _AGENT_TYPE = "action_mask", "agent_type"


class PettingZooVectorEnv(VectorEnv[Any, Any, Array]):
    """E PettingZoo environments of A possible agents each, as N = E · A rows: row e · A + a is agent a of e.

    An agent's episode begins when it appears and ends when it is terminated or truncated. An environment
    whose agents are all gone is reset within the step (SAME_STEP). While an agent is not there, its row is
    marked in ``infos["masked"]``: its observation is zeros (or where a
    discrete space starts), its reward 0, neither flag is set, and its action
    is ignored. ``infos["started"]`` marks the rows whose next observation is the first of an episode.

    An agent's type is its name up to the number at its end: ``adversary_0`` and ``adversary_1`` are of type
    ``adversary``. With one policy for all, the spaces are those of an agent. With one for each of several
    types, they are ``Dict``: an observation holds the number of the row's ``agent_type`` and for each type
    what one of them observes, zeros but for the row's own; an action holds one for each type, of which the
    row's own is played. Types are in alphabetical order.

    An ``action_mask``, in an agent's Dict observation or in its info, becomes one of ``infos``; nothing else
    of the agents' infos is passed on.

    Args:
        envs: The environments, all alike.
        policies: ``"shared"``, ``"per_type"``, or the name of the policy of each agent, which then is its
            type.

    Attributes:
        agent_types: [A], the type of each agent of an environment.

    Raises:
        ConfigurationError: Agents that share a policy have different spaces, or ``policies`` does not fit.
    """

    def __init__(self, envs: Sequence[ParallelEnv[Any, Any, Any]], policies: Policies = "shared") -> None:
        first = envs[0]
        self.agents: tuple[Any, ...] = tuple(first.possible_agents)
        self.num_envs = len(envs) * len(self.agents)
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = getattr(first, "render_mode", None)
        self.agent_types = _agent_types(self.agents, policies)
        self._names = sorted(set(self.agent_types))
        self._per_type = policies != "shared" and len(self._names) > 1
        self.single_observation_space, self.single_action_space = self._spaces(first)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._envs = list(envs)
        self._nobody = create_empty_array(self.single_observation_space, self.num_envs)
        _put_starts(self.single_observation_space, self._nobody)
        if self._per_type:
            numbers = [self._names.index(name) for name in self.agent_types]
            self._nobody[_AGENT_TYPE][:] = np.tile(numbers, len(envs))  # type: ignore[call-overload, index]
        self._present: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)

    def _spaces(self, env: ParallelEnv[Any, Any, Any]) -> tuple[Space[Any], Space[Any]]:
        both: dict[str, tuple[Space[Any], Space[Any]]] = {}
        first: dict[str, Any] = {}
        for agent, kind in zip(self.agents, self.agent_types, strict=True):
            policy = kind if self._per_type else "shared"
            of_agent = _without_mask(env.observation_space(agent)), env.action_space(agent)
            first.setdefault(policy, agent)
            if both.setdefault(policy, of_agent) != of_agent:
                raise ConfigurationError(
                    f"env {env} gives {first[policy]} the spaces {_named(both[policy])} and {agent} "
                    f"{_named(of_agent)}, so they cannot share a policy: set policies to per_type, or name a "
                    "policy for each agent there."
                )
        if not self._per_type:
            return both["shared"]
        types = spaces.Discrete(len(self._names))
        observations, actions = ({name: both[name][part] for name in self._names} for part in (0, 1))
        # As pairs, since a Dict space would sort the keys of a dictionary.
        return (
            spaces.Dict([(_AGENT_TYPE, types), *observations.items()]),
            spaces.Dict(list(actions.items())),
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start all episodes.

        Args:
            seed: Environment e gets ``seed + e · A``, the number of its first row added, if it is not None.
            options: Given to every environment.

        Returns:
            Observations [N, ...] and infos.
        """
        observations, masks = self._empty(), self._no_masks()
        for number, env in enumerate(self._envs):
            start = number * len(self.agents)
            seen, told = env.reset(seed=None if seed is None else seed + start, options=options)
            self._take_up(env, start, seen, told, (), observations, masks)
        return observations, _masked_actions(masks)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Play one action for every agent that is there.

        Args:
            actions: A batch of ``action_space``.

        Returns:
            Observations [N, ...], rewards, terminated and truncated [N], and infos.

        Raises:
            ConfigurationError: An agent left without having been terminated or truncated.
        """
        acted = self._present.copy()
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        observations, final, masks = self._empty(), self._empty(), self._no_masks()
        choices = list(iterate(self.action_space, actions))
        for number, env in enumerate(self._envs):
            start = number * len(self.agents)
            playing = [(row, agent) for row, agent in enumerate(self.agents, start) if acted[row]]
            seen, earned, terminations, truncations, told = env.step(
                {agent: self._choice(row, choices[row]) for row, agent in playing}
            )
            ended = []
            for row, agent in playing:
                rewards[row] = earned[agent]
                terminated[row], truncated[row] = terminations[agent], truncations[agent]
                if terminated[row] or truncated[row]:
                    ended.append(agent)
                    self._write(final, row, seen[agent])
                elif agent not in env.agents:
                    raise ConfigurationError(
                        f"{agent} of env {env} left without an end: let the step in which it leaves say that "
                        "it is terminated or truncated."
                    )
            self._take_up(env, start, seen, told, ended, observations, masks)
        over = terminated | truncated
        infos = {"masked": ~acted, "started": self._present & (over | ~acted), **_masked_actions(masks)}
        if over.any():
            infos["final_obs"] = np.full(self.num_envs, None)
            infos["_final_obs"] = over
            for place in np.flatnonzero(over):
                infos["final_obs"][place] = tree_map(lambda leaf, place=place: leaf[place], final)
        return observations, rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        """A frame for each row, that of its environment."""
        if self.render_mode is None:
            return None
        return tuple(frame for env in self._envs for frame in [env.render()] * len(self.agents))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def _take_up(
        self,
        env: ParallelEnv[Any, Any, Any],
        start: int,
        seen: Mapping[Any, Any],
        told: Mapping[Any, Any],
        ended: Sequence[Any],
        observations: Any,
        masks: Array,
    ) -> None:
        """Write what the agents that go on saw, after a reset if none does."""
        present = [agent for agent in env.agents if agent not in ended]
        if not present:
            seen, told = env.reset()
            present = list(env.agents)
        for row, agent in enumerate(self.agents, start):
            self._present[row] = agent in present
            if self._present[row]:
                self._write(observations, row, seen[agent])
                mask = _mask_of(seen[agent], told.get(agent, {}))
                if mask is not None:
                    masks[row] = {self._type(row): mask} if self._per_type else mask

    def _write(self, batch: Any, row: int, observation: Any) -> None:
        _write(batch[self._type(row)] if self._per_type else batch, row, observation)

    def _choice(self, row: int, actions: Any) -> Any:
        return actions[self._type(row)] if self._per_type else actions

    def _type(self, row: int) -> str:
        return self.agent_types[row % len(self.agents)]

    def _empty(self) -> Any:
        return tree_map(np.copy, self._nobody)

    def _no_masks(self) -> Array:
        return np.full(self.num_envs, None)


def make_pettingzoo_env(
    num_envs: int,
    env: str | ModuleType | Callable[..., ParallelEnv[Any, Any, Any]],
    policies: Policies = "shared",
    render_mode: str | None = None,
    **env_kwargs: Any,
) -> PettingZooVectorEnv:
    """Make PettingZoo environments and wrap them.

    On the command line ``--data.env mpe2.simple_tag_v3``, the path of a module with a ``parallel_env``, is
    enough; for another class or function ``--data.env puffer_lightning.envs.pettingzoo.make_pettingzoo_env``
    and ``--data.env_kwargs.env my_module.MyParallelEnv``.

    Args:
        num_envs: Rows, that is agents; rounded up to whole environments.
        env: A module with a ``parallel_env``, or what makes a ``ParallelEnv``, or the dotted path of either.
        policies: ``"shared"``: one policy for all agents; ``"per_type"``: one for each type, see
            :class:`PettingZooVectorEnv`; or the name of the policy of each agent.
        render_mode: ``"rgb_array"`` for frames.
        env_kwargs: Arguments of the environment.

    Raises:
        ConfigurationError: There is no such environment, its arguments do not fit, or ``policies`` does not.
    """
    make = find_parallel_env(env)
    options = env_kwargs if render_mode is None else {**env_kwargs, "render_mode": render_mode}
    try:
        first = make(**options)
    except TypeError as problem:
        if not options:
            raise
        raise ConfigurationError(f"env_kwargs {options} do not fit env {env}: {problem}.") from problem
    if not getattr(first, "possible_agents", None):
        raise ConfigurationError(
            f"env {first} does not say which agents there may be: let it list them in possible_agents."
        )
    number = -(-num_envs // len(first.possible_agents))
    return PettingZooVectorEnv([first, *(make(**options) for _ in range(number - 1))], policies)


def find_parallel_env(
    env: str | ModuleType | Callable[..., ParallelEnv[Any, Any, Any]],
) -> Callable[..., ParallelEnv[Any, Any, Any]]:
    """What makes the parallel environment that a module, a path or a function stands for.

    Raises:
        ConfigurationError: There is none.
    """
    found: Any = env
    if isinstance(env, str):
        try:
            found = pkgutil.resolve_name(env)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigurationError(
                f"env {env} cannot be imported ({problem}): give the dotted path of a module with a "
                'parallel_env, and for one of pettingzoo or mpe2 pip install "puffer-lightning[pettingzoo]".'
            ) from problem
    found = getattr(found, "parallel_env", found)
    if not callable(found):
        raise ConfigurationError(
            f"env {getattr(env, '__name__', env)} has no parallel_env: name a PettingZoo environment whose "
            "agents act at the same time."
        )
    make: Callable[..., ParallelEnv[Any, Any, Any]] = found
    return make


def _agent_types(agents: Sequence[Any], policies: Policies) -> tuple[str, ...]:
    if isinstance(policies, Mapping):
        if set(policies) != set(agents):
            raise ConfigurationError(
                f"policies names {', '.join(map(str, policies)) or 'nobody'}, and the agents are "
                f"{', '.join(map(str, agents))}: name the policy of each of them."
            )
        return tuple(policies[agent] for agent in agents)
    if policies not in ("shared", "per_type"):
        raise ConfigurationError(
            f"policies is {policies!r}: set it to shared or per_type, or name the policy of each agent."
        )
    return tuple(re.sub(r"_?\d+$", "", str(agent)) or str(agent) for agent in agents)


def _named(both: tuple[Space[Any], Space[Any]]) -> str:
    return " and ".join(str(space) for space in both)


def _without_mask(space: Space[Any]) -> Space[Any]:
    if isinstance(space, spaces.Dict) and _ACTION_MASK in space.spaces:
        return spaces.Dict([(key, part) for key, part in space.items() if key != _ACTION_MASK])
    return space


def _mask_of(observation: Any, info: Mapping[str, Any]) -> Any:
    if isinstance(observation, Mapping) and _ACTION_MASK in observation:
        return observation[_ACTION_MASK]
    return info.get(_ACTION_MASK)


def _masked_actions(masks: Array) -> dict[str, Any]:
    return {_ACTION_MASK: masks} if any(mask is not None for mask in masks) else {}


def _put_starts(space: Space[Any], batch: Any) -> None:
    """Fill what is zero and cannot be: discrete parts that start elsewhere."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            _put_starts(part, batch[key])
    elif isinstance(space, spaces.Tuple):
        for part, of_part in zip(space, batch, strict=True):
            _put_starts(part, of_part)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        batch[:] = space.start


def _write(batch: Any, row: int, observation: Any) -> None:
    """Write an agent's observation to a row of the batch, which says what is of interest in it."""
    if isinstance(batch, dict):
        for key, part in batch.items():
            _write(part, row, observation[key])
    elif isinstance(batch, tuple):
        for part, of_part in zip(batch, observation, strict=True):
            _write(part, row, of_part)
    else:
        batch[row] = observation
