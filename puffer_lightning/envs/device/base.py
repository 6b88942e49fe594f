"""What every environment in torch shares: batching, the three autoreset modes, seeding and saved state."""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from puffer_lightning.envs.arguments import check_arguments, parse_autoreset_mode
from puffer_lightning.errors import ConfigurationError

GameState = dict[str, Tensor]
"""Tensors [N, ...] by name: all that an environment's next step depends on beside action and noise."""


class Outcome(NamedTuple):
    """What a transition of N environments leads to.

    Attributes:
        state: The state from which the next step goes on.
        observations: [N, ...] of that state.
        rewards: [N] float32.
        terminated: [N] bool.
        truncated: [N] bool.
        final_observations: [N, ...] before any reset in SAME_STEP mode, else None.
    """

    state: GameState
    observations: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observations: Tensor | None


class TorchVectorEnv(VectorEnv[Tensor, Tensor, NDArray[Any]]):
    """Environments as tensors on a device, where all of them take each step together.

    A subclass gives three pure functions of tensors, ``begin``, ``advance`` and ``observe``; from these
    ``transition`` is made, pure as well and compilable in one graph. All environments are computed at every
    step, those that only reset, too, so that nothing waits for the device: no shape depends on what happened.

    Autoreset modes (gymnasium >= 1.1), with masks and flags as tensors:

    - ``NEXT_STEP``, the one without extra work: the step after an episode's end starts the next one.
    - ``SAME_STEP``: ``infos["final_obs"]`` holds the final observations of *all* rows, [N, ...]; those of
      rows that go on are the observations themselves.
    - ``DISABLED``: ``reset(options={"reset_mask": mask})`` with a tensor [N], which may be False everywhere.

    Observations must not be written to. State protocol: ``set_state(get_state())`` on any instance of the
    same class, ``num_envs`` and kind of device makes all later steps repeat bit for bit.

    Args:
        num_envs: N, at least 1.
        device: Where the environments live.
        autoreset_mode: An ``AutoresetMode``, its value (``"NextStep"``) or its name (``"NEXT_STEP"``).
        max_episode_steps: Steps after which an episode is truncated; the class's own if not given.
        compile: Compile the transition with ``torch.compile``.
        render_mode: None or one of ``render_modes``.

    Attributes:
        default_max_episode_steps: ``max_episode_steps`` if not given.
        noise_size: Uniform random numbers, at most 4, that ``begin`` takes for each row.
        render_modes: Render modes that the class offers.

    Raises:
        ConfigurationError: An argument has a value that cannot work.
    """

    default_max_episode_steps: ClassVar[int]
    noise_size: ClassVar[int]
    render_modes: ClassVar[tuple[str, ...]] = ()
    render_fps: ClassVar[int] = 15

    def __init__(
        self,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        compile: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_arguments(type(self).__name__, num_envs, render_mode, self.render_modes)
        self.max_episode_steps = max_episode_steps or self.default_max_episode_steps
        if self.max_episode_steps < 1:
            raise ConfigurationError(f"max_episode_steps is {max_episode_steps}: set it to 1 or more.")
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self.metadata = {
            "render_modes": list(self.render_modes),
            "render_fps": self.render_fps,
            "autoreset_mode": self.autoreset_mode,
        }
        try:
            self.device = torch.device(device)
            self._generator = torch.Generator(self.device)
        except RuntimeError as problem:
            raise ConfigurationError(
                f"device {device} cannot be used here, set it to cpu or another one: "
                f"{str(problem).partition(chr(10))[0]}"
            ) from problem
        self._generator.seed()
        self.single_observation_space, self.single_action_space = self.spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._transition = torch.compile(self.transition) if compile else self.transition
        self._state: GameState | None = None

    @abstractmethod
    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Spaces of one environment: observation, action."""

    @abstractmethod
    def begin(self, noise: Tensor) -> GameState:
        """States at the start of an episode, for uniform noise [N, noise_size] in [-1, 1)."""

    @abstractmethod
    def advance(self, state: GameState, actions: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Play actions [N]; returns the next states, rewards [N] float32 and terminated [N] bool."""

    @abstractmethod
    def observe(self, state: GameState) -> Tensor:
        """Observations [N, ...] of states."""

    def transition(self, state: GameState, actions: Tensor, noise: Tensor) -> Outcome:
        """One step of all environments, as a pure function of tensors.

        Args:
            state: As in ``get_state``, without its generator.
            actions: [N].
            noise: [N, noise_size], uniform in [-1, 1); for the rows that reset.
        """
        elapsed, waiting = state["elapsed"] + 1, state["ended"]
        game, rewards, terminated = self.advance(state, actions)
        truncated = elapsed >= self.max_episode_steps
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            live = ~waiting
            rewards, terminated, truncated = rewards * live, terminated & live, truncated & live
        ended = terminated | truncated
        final = None
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            final, live = self.observe(game), ~ended
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            game = _select(live, game, self.begin(noise))
            elapsed = elapsed * live
        after = {**game, "elapsed": elapsed, "ended": ended}
        return Outcome(after, self.observe(after), rewards, terminated, truncated, final)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start an episode in every row, or in the rows of ``options["reset_mask"]``.

        Args:
            seed: Seeds the one generator that all rows share; None goes on with it.
            options: ``{"reset_mask": bool [N]}``, a tensor, leaves the rows where it is False as they are.

        Returns:
            Observations [N, ...] and an empty info dict.

        Raises:
            ConfigurationError: The mask is not a boolean tensor [N].
        """
        if seed is not None:
            self._generator.manual_seed(seed)
        mask = (options or {}).get("reset_mask")
        fresh = self._start(self._noise())
        if mask is None:
            self._state = fresh
        else:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (self.num_envs,):
                raise ConfigurationError(
                    "options['reset_mask'] does not select rows: "
                    f"pass a bool tensor of shape ({self.num_envs},)."
                )
            assert self._state is not None, "call reset without a mask first"
            self._state = _select(mask, fresh, self._state)
        return self.observe(self._state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:  # type: ignore[override]
        """Play one action in every row.

        Args:
            actions: [N] on the environments' device.

        Returns:
            Observations [N, ...], rewards (float32), terminated, truncated (bool), each [N], and infos.
        """
        assert self._state is not None, "call reset before step"
        assert actions.shape == (self.num_envs,), f"actions have shape {tuple(actions.shape)}"
        outcome = self._transition(self._state, actions, self._noise())
        self._state = outcome.state
        infos = {} if outcome.final_observations is None else {"final_obs": outcome.final_observations}
        return outcome.observations, outcome.rewards, outcome.terminated, outcome.truncated, infos

    def get_state(self) -> dict[str, Tensor]:
        """Everything that later steps depend on: copies of the tensors by name, and the generator's state."""
        assert self._state is not None, "call reset first"
        state = {name: tensor.clone() for name, tensor in self._state.items()}
        return {**state, "generator": self._generator.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Take up a state from ``get_state``, without a reset.

        Args:
            state: As returned by ``get_state`` on the same class with the same ``num_envs``.

        Raises:
            ConfigurationError: The state is of another class or another ``num_envs``.
        """
        wanted = self._start(torch.zeros(1, self.noise_size, device=self.device))
        if set(state) != {*wanted, "generator"}:
            raise ConfigurationError(
                f"The saved state is not of {type(self).__name__}: resume with the environment it is from."
            )
        rows = len(state["elapsed"])
        if rows != self.num_envs:
            raise ConfigurationError(f"The saved state has {rows} rows: set num_envs={rows}.")
        self._state = {name: state[name].to(self.device, copy=True) for name in wanted}
        self._generator.set_state(state["generator"].cpu())

    def _noise(self) -> Tensor:
        # A draw of 64 bits makes four numbers of 16, at a third of the price of four floats.
        draws = torch.empty(self.num_envs, dtype=torch.int64, device=self.device)
        draws.random_(-(2**63), None, generator=self._generator)
        return draws.view(torch.int16).view(4, self.num_envs)[: self.noise_size].t() * 2**-15

    def _start(self, noise: Tensor) -> GameState:
        rows = len(noise)
        return {
            **self.begin(noise),
            "elapsed": torch.zeros(rows, dtype=torch.int32, device=noise.device),
            "ended": torch.zeros(rows, dtype=torch.bool, device=noise.device),
        }


def _select(mask: Tensor, where_true: GameState, where_false: GameState) -> GameState:
    """The one state where ``mask`` [N], the other where not."""
    return {
        name: torch.where(mask.view(-1, *[1] * (leaf.ndim - 1)), leaf, where_false[name])
        for name, leaf in where_true.items()
    }
