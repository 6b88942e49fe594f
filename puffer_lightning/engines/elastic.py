"""The environments of a run that is resumed, on as many ranks as there are now."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from puffer_lightning import files
from puffer_lightning.distributed import rank, world_size
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.ppo import PPOConfig
from puffer_lightning.rollout import deal_statistics

State = dict[str, Any]

ENTRY = "ppo"
"""The name, in a checkpoint, of what PPO leaves."""


def read_sizes(path: str | Path | None) -> State | None:
    """The sizes of the rollouts of the run that wrote a checkpoint, without reading all of it.

    Args:
        path: The checkpoint, if there is one.
    """
    if path is None:
        return None
    # Of a sharded checkpoint what is not sharded lies in a file of its own.
    file = Path(path) / "meta.pt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return None
    try:
        checkpoint = files.load_part(file, file, mmap=True)
    except ConfigurationError:
        return None  # Whoever loads it says what is wrong with it.
    sizes: State | None = checkpoint.get(ENTRY, {}).get("sizes")
    return sizes


def kept_envs(saved: State | None, config: PPOConfig, sizes: State, ranks: int) -> int | None:
    """How many environments all ranks together go on with; None where their number is not a checkpoint's.

    The options that say how many there are count for the number of ranks of the first run. With other options
    they win.

    Args:
        saved: Sizes of a checkpoint's rollouts, if one is resumed.
        config: Divides rollouts into minibatches.
        sizes: The options ``num_envs``, ``split_envs`` and ``horizon``.
        ranks: The number of ranks.

    Raises:
        ConfigurationError: They cannot be divided among the ranks; the message names numbers that work.
    """
    if saved is None or any(saved[name] != sizes[name] for name in ("num_envs", "split_envs")):
        return None
    total = int(saved["total_envs"])
    work = [number for number in range(1, total + 1) if _divides(total, number, sizes["horizon"], config)]
    if not work:
        return None  # Nor can they with these coefficients on as many ranks as before; these are refused.
    if ranks not in work:
        raise ConfigurationError(
            f"The {total} environments of the checkpoint's run cannot be divided among {ranks} ranks: start "
            f"{_listed(work)} of them, or change data.num_envs, for another batch."
        )
    return total


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _divides(total: int, ranks: int, horizon: int, config: PPOConfig) -> bool:
    if total % ranks:
        return False
    try:
        config.check_sizes(horizon, total // ranks)
    except ConfigurationError:
        return False
    return True


def own_part(saved: State, num_envs: int) -> State:
    """What this rank takes up of what :func:`~puffer_lightning.engines.resume.leave` returned.

    On another number of ranks the environments are dealt out anew, in the same order, and so are the
    statistics of episodes. A rank that was not there before lacks the states of random generators.

    Args:
        saved: As returned.
        num_envs: Environments of this rank.
    """
    parts, ranks = saved["ranks"], world_size()
    here, there = num_envs * ranks, saved["sizes"]["total_envs"]
    lost = next((part["collector"]["lost"] for part in parts if "lost" in part["collector"]), None)
    if here != there:
        lost = f"there are {here} environments now and were {there}"
    elif lost is None and len(parts) != ranks and any(_undivided(part) for part in parts):
        lost = "their state cannot be divided among another number of ranks"
    if lost is not None:
        parts = [without_episodes(part, lost) for part in parts]
    return parts[rank()] if len(parts) == ranks else _deal(parts, rank() * num_envs, num_envs)


def without_episodes(part: State, reason: str) -> State:
    """A rank's part without the episodes that were under way."""
    learner = {name: value for name, value in part["learner"].items() if name != "rows"}
    collector = {name: part["collector"][name] for name in ("actions",) if name in part["collector"]}
    return {**part, "learner": learner, "collector": {**collector, "lost": reason}}


def _undivided(part: State) -> bool:
    return bool(part["collector"]["rest"].keys() - {"generator"})


def _deal(parts: Sequence[State], first: int, num_envs: int) -> State:
    """The part of this rank among other ranks than those that left ``parts``."""
    own = parts[rank()] if rank() < len(parts) else None
    learner, collector = ({**parts[0][name]} for name in ("learner", "collector"))
    learner["statistics"] = deal_statistics(
        [part["learner"]["statistics"] for part in parts], rank(), world_size()
    )
    for name, state in (("learner", learner), ("collector", collector)):
        if "rows" in state:
            state["rows"] = _deal_rows([part[name]["rows"] for part in parts], first, num_envs)
    if own is None:
        del learner["shuffling"], collector["actions"]
        return {"learner": learner, "collector": {**collector, "rest": {}}}
    learner["shuffling"], collector["actions"] = own["learner"]["shuffling"], own["collector"]["actions"]
    if "rest" in collector:
        collector["rest"] = own["collector"]["rest"]
    return {"learner": learner, "collector": collector, "random": own["random"]}


def _deal_rows(parts: Sequence[Any], first: int, num_envs: int) -> Any:
    kind = parts[0]
    if isinstance(kind, dict):
        return {name: _deal_rows([part[name] for part in parts], first, num_envs) for name in kind}
    if isinstance(kind, tuple):
        return kind[0], _deal_rows([part[1] for part in parts], first, num_envs)
    if isinstance(kind, Tensor):
        return torch.cat(list(parts))[first : first + num_envs]
    return [row for part in parts for row in part][first : first + num_envs]
