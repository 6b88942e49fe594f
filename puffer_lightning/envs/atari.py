"""Atari 2600 games: the vector environment of ``ale-py``, which takes the place of its own."""

from typing import Any

from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray
from typing_extensions import override

from puffer_lightning.envs.threads import default_threads
from puffer_lightning.errors import ConfigurationError

Array = NDArray[Any]

_FRAMES_PER_SECOND = 60
_LARGEST_SEED = 2**31 - 1
_SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}


class Atari(AtariVectorEnv):
    """A game as ``ale_py`` steps and preprocesses it, in threads, with frames to look at.

    Observations are the last four of what the agent was shown, uint8 [N, 4, 84, 84]; each is the maximum of
    the last two of ``frameskip`` frames. Episodes begin with up to 30 frames of no action.

    Source: Mnih et al. 2015 (doi:10.1038/nature14236), Methods; Machado et al. 2018 (arXiv:1709.06009) for
    ``repeat_action_probability``, which is 0.25 in the ids of version 5.

    Args:
        game: ``"pong"``, ``"breakout"``, ...
        num_envs: N.
        num_threads: Threads that step them; this rank's share of the machine's processors, if 0.
        reward_clipping: Rewards are -1, 0 or 1. Off, unlike in ``ale_py``, since returns would not be the
            score; ``model.clip_rewards`` clips what is learned from.
        render_mode: ``"rgb_array"`` for the screen, [210, 160, 3], from ``render()``. It comes from a second
            emulator of each game, which is given the same seeds and actions.
        options: As of ``ale_py.vector_env.AtariVectorEnv``.

    Raises:
        ConfigurationError: An option does not work here.
    """

    def __init__(
        self,
        game: str,
        num_envs: int,
        *,
        num_threads: int = 0,
        reward_clipping: bool = False,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        for name, why in (
            ("batch_size", "all environments step at once"),
            ("life_loss_info", "the game goes on after the end that it reports; episodic_life starts anew"),
        ):
            if options.get(name):
                raise ConfigurationError(f"env_kwargs.{name} does not work for Atari, {why}: leave it out.")
        # Not the class's: that dict is shared by all vector environments, and the base class writes to it.
        self.metadata = {"render_modes": ["rgb_array"]}
        options |= {
            "num_threads": num_threads or default_threads(num_envs),
            "reward_clipping": reward_clipping,
        }
        super().__init__(game, num_envs, **options)
        self.metadata["render_fps"] = _FRAMES_PER_SECOND // options.get("frameskip", 4)
        self.render_mode = render_mode
        self._screens = None if render_mode is None else Atari(game, num_envs, **(options | _SCREEN))
        self._shown: Array | None = None

    @override
    def reset(
        self, *, seed: int | Array | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new games.

        Args:
            seed: Environment i is given ``seed + i``, or the i-th of an array.
            options: None, or ``reset_mask``, [N] bool: which environments to reset.

        Returns:
            Observations [N, 4, 84, 84] and infos.
        """
        if isinstance(seed, int):
            seed %= _LARGEST_SEED - self.num_envs
        if self._screens is not None:
            self._shown, _ = self._screens.reset(seed=seed, options=options)
        observations, infos = super().reset(seed=seed, options=options)
        return observations, infos

    @override
    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play ``frameskip`` frames of every game.

        Args:
            actions: [N] int.

        Returns:
            Observations, rewards [N], terminated [N], truncated [N] and infos.
        """
        if self._screens is not None:
            self._shown = self._screens.step(actions)[0]
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, terminated, truncated, infos

    @override
    def render(self) -> tuple[Array, ...] | None:
        """The screen of each game, [210, 160, 3]; None without ``render_mode``."""
        return None if self._shown is None else tuple(self._shown[:, 0])
