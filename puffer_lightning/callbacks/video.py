"""``Video``: films of the evaluated policy."""

import re
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import error
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from typing_extensions import override

from puffer_lightning.callbacks.protocols import PPOModule, RolloutData, env_name, ppo_parts
from puffer_lightning.distributed import derive_seed
from puffer_lightning.envs import make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import play

Frame = NDArray[np.uint8]

_DEFAULT_FPS = 30
# Smaller frames are enlarged in whole pixels, or a grid world would be a film of a few pixels.
_LEAST_SIDE = 128
_ENCODING = {
    # 4:2:0 colour, the only kind that all players know, wants even sides.
    "mp4": {"codec": "libx264", "pix_fmt_out": "yuv420p", "filter": "pad=ceil(iw/2)*2:ceil(ih/2)*2"},
    # A palette for each frame rather than for the film, which would have to be held in memory.
    "gif": {
        "codec": "gif",
        "pix_fmt_out": "pal8",
        "filter": "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1",
    },
}


class Video(Callback):
    """Films whole episodes after each validation and test (not the one before training that checks it works).

    Writes ``<dirpath>/<environment>-steps-<environment steps>-episode-<i>.mp4``, i from 0. The episodes are
    played on rank 0, greedily or not as ``data.eval_greedy`` says, and start alike each time, so that one
    film can be compared with the next.

    Args:
        dirpath: Folder of the films; it is made.
        episodes: Films each time.
        format: ``mp4`` (H.264) or ``gif``.
        fps: Frames per second; the environment's own (``metadata["render_fps"]``) if not given, else 30.

    Raises:
        ConfigurationError: imageio is missing, the environment draws no frames, the module is not ``PPO``, or
            an option is out of its range; before anything runs.
    """

    def __init__(
        self,
        dirpath: str = "videos",
        episodes: int = 1,
        format: Literal["mp4", "gif"] = "mp4",
        fps: int | None = None,
    ) -> None:
        if episodes < 1:
            raise ConfigurationError(
                f"episodes is {episodes}: set it to 1 or more, or leave out the callback Video."
            )
        if format not in _ENCODING:
            raise ConfigurationError(f"format is {format}: set it to mp4 or gif.")
        if fps is not None and fps < 1:
            raise ConfigurationError(f"fps is {fps}: set it to 1 or more.")
        self._dirpath = Path(dirpath)
        self._episodes = episodes
        self._format = format
        self._fps = fps

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _, data = ppo_parts(trainer, self)
        if find_spec("imageio_ffmpeg") is None:
            raise ConfigurationError(
                'The callback Video needs imageio: pip install "puffer-lightning[video]", or leave it out.'
            )
        # On every rank, so that all of them stop.
        if stage != "predict":
            _make_drawing_env(data).close()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_policy(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_policy(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._film(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._film(trainer, pl_module)

    def _check_policy(self, trainer: Trainer) -> None:
        """Refuse, on every rank, a policy that rank 0 could not play without the others."""
        module, _ = ppo_parts(trainer, self)
        if any(hasattr(parameter, "full_tensor") for parameter in module.policy.parameters()):
            raise ConfigurationError(
                "The callback Video cannot play a policy that is sharded over ranks: leave it out here and "
                "film the checkpoint with trainer.strategy auto on one device."
            )

    def _film(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        module, data = ppo_parts(trainer, self)
        env = _make_drawing_env(data)
        try:
            self._dirpath.mkdir(parents=True, exist_ok=True)
            for episode in range(self._episodes):
                name = re.sub(r"[^\w.-]+", "-", env_name(data.env))
                path = self._dirpath / f"{name}-steps-{module.env_steps}-episode-{episode}.{self._format}"
                total = self._film_episode(path, module, data, env, episode)
                pl_module.print(f"an episode of return {total:.2f} filmed in {path}")
        finally:
            env.close()

    def _film_episode(
        self, path: Path, module: PPOModule, data: RolloutData, env: VectorEnv[Any, Any, Any], episode: int
    ) -> float:
        film = _Film(path, self._format, self._fps or env.metadata.get("render_fps") or _DEFAULT_FPS)
        seed = derive_seed(torch.initial_seed(), "video", episode)
        try:
            played = play(
                module.policy,
                env,
                1,
                seed=seed,
                greedy=data.eval_greedy,
                on_step=lambda: film.add(_draw(env)),
            )
            # Except in this mode, the last step has already started the next episode.
            film.close(keep_last=env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP)
        finally:
            film.close()
        return float(played.returns[0])


class _Film:
    """A file that frames are added to; encoded as they come, so that no episode is too long for memory."""

    def __init__(self, path: Path, format: str, fps: float) -> None:
        self._path, self._encoding, self._fps = path, _ENCODING[format], fps
        self._encoder: Generator[None, bytes, None] | None = None
        self._last: Frame | None = None

    def add(self, frame: Frame) -> None:
        """Add a frame [H, W, 3] uint8, all of one size."""
        self._write_last()
        self._last = frame

    def close(self, keep_last: bool = True) -> None:
        """Finish the file, with or without the frame added last."""
        if keep_last:
            self._write_last()
        self._last = None
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    def _write_last(self) -> None:
        if self._last is None:
            return
        scale = -(-_LEAST_SIDE // max(self._last.shape[:2]))
        frame = self._last.repeat(scale, axis=0).repeat(scale, axis=1) if scale > 1 else self._last
        if self._encoder is None:
            self._encoder = self._start((frame.shape[1], frame.shape[0]))
        self._encoder.send(np.ascontiguousarray(frame).tobytes())

    def _start(self, size: tuple[int, int]) -> Generator[None, bytes, None]:
        import imageio_ffmpeg  # type: ignore[import-untyped]  # an extra of this package

        encoder: Generator[None, bytes, None] = imageio_ffmpeg.write_frames(
            str(self._path),
            size,
            fps=self._fps,
            codec=self._encoding["codec"],
            pix_fmt_out=self._encoding["pix_fmt_out"],
            output_params=["-vf", self._encoding["filter"]],
            macro_block_size=1,
        )
        encoder.send(None)  # type: ignore[arg-type]  # starts the generator
        return encoder


def _make_drawing_env(data: RolloutData) -> VectorEnv[Any, Any, Any]:
    """One environment that has been seen to draw frames."""
    try:
        env = make_vector_env(data.env, 1, data.env_kwargs, render_mode="rgb_array", wrappers=data.wrappers)
    except (ConfigurationError, error.Error) as problem:
        raise _cannot_draw(data, str(problem)) from problem
    try:
        env.reset(seed=0)
        _draw(env)
    except Exception as problem:  # each drawing library fails with errors of its own
        env.close()
        raise _cannot_draw(data, str(problem)) from problem
    return env


def _cannot_draw(data: RolloutData, problem: str) -> ConfigurationError:
    return ConfigurationError(
        'The callback Video needs an environment with render_mode "rgb_array", and env '
        f"{env_name(data.env)} draws no frames ({problem.rstrip('.') or 'it has no render method'}): "
        "leave the callback out, or add rendering."
    )


def _draw(env: VectorEnv[Any, Any, Any]) -> Frame:
    """The frame [H, W, 3] of the first environment.

    Raises:
        ValueError: There is none.
    """
    frames = env.render()
    frame = frames[0] if isinstance(frames, tuple | list) and frames else None
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise ValueError("render() gives no frames [H, W, 3] of uint8")
    return frame
