"""Parallel environments whose agents die early, appear late, mask their actions and need one another."""

from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from tests.environments import Episode, Place, reward

PLACES = spaces.Box(0, np.inf, (3,), np.float32)


class Crew(ParallelEnv[str, Any, Any]):
    """Observes the :class:`Place` of each agent. One dies early, one comes late and is cut off.

    Who acts at which of the five steps of an episode: walker_0 at 0 and 1, walker_1 from 1, sitter_0 always.
    """

    metadata: ClassVar[Any] = {"name": "crew_v0", "render_modes": ["rgb_array"], "render_fps": 7}
    possible_agents: ClassVar[Any] = ["walker_0", "walker_1", "sitter_0"]
    arrivals: ClassVar[Any] = {"walker_0": 0, "walker_1": 1, "sitter_0": 0}
    lives: ClassVar[Any] = {
        "walker_0": Episode(2, "terminated"),
        "walker_1": Episode(4, "truncated"),
        "sitter_0": Episode(5, "terminated"),
    }

    def __init__(self, first_row: int = 0, render_mode: str | None = None) -> None:
        self.first_row, self.render_mode = first_row, render_mode
        self.episode = -1
        self.closed = False

    def observation_space(self, agent: str) -> Any:
        return PLACES

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def observe(self) -> Any:
        return {agent: np.array(place, np.float32) for agent, place in self.places.items()}

    def arrive(self) -> None:
        for row, agent in enumerate(self.possible_agents, self.first_row):
            if self.arrivals[agent] == self.elapsed:
                self.agents.append(agent)
                self.places[agent] = Place(row, self.episode, 0)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.elapsed = self.episode + 1, 0
        self.agents: list[str] = []
        self.places: dict[str, Place] = {}
        self.arrive()
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert sorted(actions) == sorted(self.agents), "all who are there, and nobody else"
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items())
        rewards = {agent: reward(place) for agent, place in self.places.items()}
        self.places = {agent: place._replace(step=place.step + 1) for agent, place in self.places.items()}
        over = {agent: self.lives[agent].length == place.step for agent, place in self.places.items()}
        terminations, truncations = (
            {agent: over[agent] and self.lives[agent].ending == ending for agent in actions}
            for ending in ("terminated", "truncated")
        )
        observations = self.observe()
        self.agents = [agent for agent in self.agents if not over[agent]]
        self.places = {agent: self.places[agent] for agent in self.agents}
        self.elapsed += 1
        self.arrive()
        return {**observations, **self.observe()}, rewards, terminations, truncations, {}

    def render(self) -> Any:
        return np.full((4, 4, 3), self.first_row, np.uint8)

    def close(self) -> None:
        self.closed = True


class Choosing(ParallelEnv[str, Any, Any]):
    """Two types with different choices, of which a mask leaves some; the second agent leaves early."""

    metadata: ClassVar[Any] = {"name": "choosing_v0"}
    possible_agents: ClassVar[Any] = ["few_0", "many_0"]
    choices: ClassVar[Any] = {"few_0": 2, "many_0": 5}

    def __init__(self, where: Literal["observation", "info"] = "observation", equal: bool = False) -> None:
        self.where, self.equal = where, equal

    def size(self, agent: str) -> int:
        return 5 if self.equal else self.choices[agent]

    def observation_space(self, agent: str) -> Any:
        seen = {"observation": spaces.Discrete(3, start=4)}
        if self.where == "observation":
            seen["action_mask"] = spaces.MultiBinary(self.size(agent))  # type: ignore[assignment]
        return spaces.Dict(seen)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(self.size(agent))

    def observe(self) -> Any:
        self.masks = {}
        for agent in self.agents:
            mask = np.zeros(self.size(agent), np.int8)
            mask[self.rng.integers(self.size(agent))] = 1
            self.masks[agent] = mask
        seen = {agent: {"observation": np.int64(self.rng.integers(4, 7))} for agent in self.agents}
        if self.where == "info":
            return seen, {agent: {"action_mask": mask} for agent, mask in self.masks.items()}
        return {agent: {**seen[agent], "action_mask": self.masks[agent]} for agent in self.agents}, {}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.rng, self.elapsed = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        return self.observe()

    def step(self, actions: Any) -> Any:
        for agent, action in actions.items():
            assert self.masks[agent][action], f"{agent} may not choose {action}"
        self.elapsed += 1
        over = {agent: self.elapsed == (2 if agent == "many_0" else 4) for agent in self.agents}
        seen, infos = self.observe()
        rewards, never = dict.fromkeys(self.agents, 1.0), dict.fromkeys(self.agents, False)
        self.agents = [agent for agent in self.agents if not over[agent]]
        return seen, rewards, over, never, infos


class Telling(ParallelEnv[str, Any, Any]):
    """The speaker sees a number and says a word, then the listener, who heard it, names the number."""

    metadata: ClassVar[Any] = {"name": "telling_v0"}
    possible_agents: ClassVar[Any] = ["speaker_0", "listener_0"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(3) if agent == "speaker_0" else spaces.Box(0, 1, (4,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4 if agent == "speaker_0" else 3)

    def observe(self, word: int | None) -> Any:
        heard = np.zeros(4, np.float32)
        if word is not None:
            heard[word] = 1
        return {"speaker_0": np.int64(self.number), "listener_0": heard}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.number, self.said = self.rng.integers(3), False
        self.agents = list(self.possible_agents)
        return self.observe(None), {}

    def step(self, actions: Any) -> Any:
        over, self.said = self.said, True
        right = float(over and actions["listener_0"] == self.number)
        flags, never = dict.fromkeys(self.agents, over), dict.fromkeys(self.agents, False)
        rewards = dict.fromkeys(self.agents, right)
        self.agents = [] if over else self.agents
        return self.observe(int(actions["speaker_0"])), rewards, flags, never, {}
