"""``EpisodeWriter``: played episodes as a file that other tools read."""

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from typing_extensions import override

from puffer_lightning.callbacks.protocols import ppo_parts
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import Episodes, Trajectory


class EpisodeWriter(Callback):
    """Writes the episodes that ``predict`` plays to a NumPy ``.npz`` file.

    The arrays lie one episode after the other, S steps in all of K episodes; names follow Minari, the flat
    layout D4RL:

    ================== =========== ==========================================================================
    name               shape       what
    ================== =========== ==========================================================================
    ``observations``   [S, ...]    what the policy saw before each action; Dict and Tuple observations have an
                                   entry for each part, ``observations/<key>`` and ``observations/<index>``
    ``actions``        [S, ...]    as the environment was given them; Dict and Tuple actions likewise
    ``rewards``        [S]
    ``terminations``   [S] bool    the step reached a terminal state
    ``truncations``    [S] bool    the step was the last, and not a terminal one
    ``episode_lengths`` [K] int64  steps of each episode
    ``episode_returns`` [K] float64 undiscounted sum of each episode's rewards
    ================== =========== ==========================================================================

    The observation after the last step is not kept. One episode each::

        data = np.load("episodes.npz")
        rewards = np.split(data["rewards"], data["episode_lengths"].cumsum()[:-1])

    The file is there whole or not at all. With several ranks each writes its own share, without waiting for
    the others: rank r to ``episodes-rank<r>.npz``, and nothing if it played none.

    Args:
        path: The file, ending in ``.npz``; its folder is made.

    Raises:
        ConfigurationError: ``path`` ends otherwise, or the module is not ``PPO``.
    """

    def __init__(self, path: str = "episodes.npz") -> None:
        if Path(path).suffix != ".npz":
            raise ConfigurationError(f"path is {path}: let the name of the episodes' file end in .npz.")
        self._path = Path(path)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)

    # Not a BasePredictionWriter: for one of those Lightning warns that the loader has no batch indices.
    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert isinstance(outputs, Episodes)
        if not outputs.trajectories:
            return
        path = self._path
        if trainer.world_size > 1:
            path = path.with_stem(f"{path.stem}-rank{trainer.global_rank}")
        write_episodes(path, outputs)
        pl_module.print(
            f"{len(outputs.lengths)} episodes, {outputs.lengths.sum():,} steps, written to {path}"
        )


def write_episodes(path: Path, episodes: Episodes) -> None:
    """Write recorded episodes in the format of :class:`EpisodeWriter`.

    Args:
        path: The file; one that is there is replaced, at one stroke, once the new one is whole.
        episodes: At least one, with their trajectories.
    """
    trajectories = episodes.trajectories
    arrays = _concatenated("observations", [trajectory.observations for trajectory in trajectories])
    arrays |= _concatenated("actions", [trajectory.actions for trajectory in trajectories])
    arrays |= {
        "rewards": np.concatenate([trajectory.rewards for trajectory in trajectories]),
        "terminations": _ends(trajectories, terminated=True),
        "truncations": _ends(trajectories, terminated=False),
        "episode_lengths": episodes.lengths,
        "episode_returns": episodes.returns,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file, since a file is replaced at one stroke only within a file system.
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _concatenated(name: str, parts: list[Any]) -> dict[str, NDArray[Any]]:
    """Arrays of all episodes end to end, by name; a dictionary's or tuple's entries by ``name/<key>``."""
    first = parts[0]
    if isinstance(first, dict):
        keys: list[Any] = list(first)
    elif isinstance(first, tuple | list):
        keys = list(range(len(first)))
    else:
        return {name: np.concatenate(parts)}
    arrays: dict[str, NDArray[Any]] = {}
    for key in keys:
        arrays |= _concatenated(f"{name}/{key}", [part[key] for part in parts])
    return arrays


def _ends(trajectories: list[Trajectory], terminated: bool) -> NDArray[np.bool_]:
    """[S], True at the last steps of the episodes that ended in this way."""
    ends = np.zeros(sum(len(trajectory.rewards) for trajectory in trajectories), dtype=np.bool_)
    last = np.cumsum([len(trajectory.rewards) for trajectory in trajectories]) - 1
    ends[last] = [trajectory.terminated is terminated for trajectory in trajectories]
    return ends
