"""MiniGrid: observations of categories and missions of words, as spaces that a policy can read."""

from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import ObservationWrapper, spaces

from puffer_lightning.errors import ConfigurationError


class Categories(ObservationWrapper[Any, Any, Any]):
    """Says of MiniGrid's observations what they are.

    The ``image`` [7, 7, 3] is no picture but the object, colour and state of each cell. So its space becomes
    MultiDiscrete, which policies encode one-hot. The ``mission``, a text, becomes Discrete, the number of the
    sentence among all that the environment can say; where that is a single one, it is left out.

    Args:
        env: Of the package ``minigrid``, also in one of its wrappers that keep the three observations.

    Raises:
        ConfigurationError: Its observations are others, or its missions cannot be counted.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        # Not at the top: what is missing shall be noticed where the environment is named.
        from minigrid.core.constants import COLOR_TO_IDX, DIR_TO_VEC, OBJECT_TO_IDX
        from minigrid.core.mission import MissionSpace

        given = env.observation_space
        if not isinstance(given, spaces.Dict) or {"image", "direction", "mission"} - given.keys():
            raise ConfigurationError(
                f"Categories is for MiniGrid's observations, not for {given}: put it right around MiniGrid's "
                "environment."
            )
        mission, image = given["mission"], given["image"]
        if type(mission) is not MissionSpace:
            raise ConfigurationError(
                f"Categories cannot count the missions of {type(mission).__name__}: choose an environment of "
                "MiniGrid's own, or encode the sentences in a wrapper of yours."
            )
        sentences = [mission.mission_func(*words) for words in product(*(mission.ordered_placeholders or []))]
        self._number = {sentence: number for number, sentence in enumerate(sentences)}
        # A state is that of a door, of which there are fewer, or where an agent looks.
        kinds = np.array([len(OBJECT_TO_IDX), len(COLOR_TO_IDX), len(DIR_TO_VEC)], dtype=np.uint8)
        read: dict[str, gym.Space[Any]] = {
            "image": spaces.MultiDiscrete(np.broadcast_to(kinds, image.shape or ()), dtype=np.uint8),
            "direction": given["direction"],
        }
        self._reads_mission = len(sentences) > 1
        if self._reads_mission:
            read["mission"] = spaces.Discrete(len(sentences))
        self.observation_space = spaces.Dict(read)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The same, the mission by its number."""
        read = {name: observation[name] for name in ("image", "direction")}
        if self._reads_mission:
            read["mission"] = self._number[observation["mission"]]
        return read
