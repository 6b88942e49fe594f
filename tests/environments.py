"""Environments and policies of which everything is known beforehand."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from torch import Tensor

from puffer_lightning.policies import Policy, State, make_head

MODES = list(AutoresetMode)

Ending = Literal["terminated", "truncated", "both"]


class Place(NamedTuple):
    """A step: of which environment, in which of its episodes, and which one there; all from 0."""

    row: int
    episode: int
    step: int


class Episode(NamedTuple):
    length: int
    ending: Ending


# Rows end together and apart, twice in a row, after one step, and in both ways.
SCHEDULES = (
    (Episode(3, "truncated"), Episode(2, "terminated")),
    (Episode(1, "truncated"), Episode(1, "truncated"), Episode(4, "terminated")),
    (Episode(5, "terminated"), Episode(3, "both"), Episode(2, "truncated")),
    (Episode(1000, "truncated"),),
)


def reward(place: Place) -> float:
    return 1.0 + place.row + 0.5 * place.step - 3.0 * place.episode


def value(place: Place) -> float:
    """What :class:`KnownValues` estimates for the observation *before* a step; different for all."""
    return 100.0 * place.row + 7.0 * place.episode + 0.25 * place.step + 1.0


class Counter(gym.Env[Any, Any]):
    """Observes its :class:`Place`, whatever it is told to do; its episodes follow a schedule."""

    observation_space = spaces.Box(0, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, row: int, schedule: Sequence[Episode]) -> None:
        self.schedule = schedule
        self.place = Place(row, -1, 0)

    def observe(self) -> Any:
        return np.array(self.place, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = Place(self.place.row, self.place.episode + 1, 0)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        earned = reward(self.place)
        self.place = self.place._replace(step=self.place.step + 1)
        length, ending = self.schedule[self.place.episode % len(self.schedule)]
        over = self.place.step == length
        return (
            self.observe(),
            earned,
            over and ending in ("terminated", "both"),
            over and ending in ("truncated", "both"),
            {},
        )


def counters(
    mode: AutoresetMode, schedules: Sequence[Sequence[Episode]] = SCHEDULES, kind: type[Counter] = Counter
) -> SyncVectorEnv:
    """One counter a schedule, in gymnasium's own implementation of the autoreset modes."""
    rows = [partial(kind, row, schedule) for row, schedule in enumerate(schedules)]
    return SyncVectorEnv(rows, autoreset_mode=mode)


def places(observations: Tensor | NDArray[Any]) -> list[Place]:
    """The places that a batch of observations [B, 3] shows."""
    return [Place(*map(int, observation)) for observation in observations]


class KnownValues(Policy):
    """Acts at random; its values are :func:`value`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = make_head(1, Counter.action_space)

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        row, episode, step = observations.unbind(-1)
        values = 100.0 * row + 7.0 * episode + 0.25 * step + 1.0
        return self.head(torch.zeros(*values.shape, 1)), values, state


class RunningSum(KnownValues):
    """Remembers the sum of step + 1 over all observations since it was last restarted; that is its value."""

    def initial_state(self, num_envs: int, device: torch.device | str | None = None) -> State:
        return torch.zeros(num_envs, device=device)

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        params, _, _ = super().forward(observations)
        total = state + observations[..., 2] + 1.0
        return params, total, total
