"""What a run that is stopped leaves behind, and how another one takes it up."""

import random
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from puffer_lightning.distributed import check_same_options, derive_seed, gather, rank, world_size
from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.elastic import own_part, without_episodes
from puffer_lightning.envs.state import pack, unpack
from puffer_lightning.ppo import Learner

State = dict[str, Any]


def leave(learner: Learner, data: RolloutDataModule) -> State:
    """What a run leaves to one that goes on from here; for all ranks to call.

    Returns:
        ``env_steps``, ``seed``, ``sizes`` of the rollouts, and ``ranks``: for each data-parallel rank what
        its ``learner`` and ``collector`` leave, and the states of all other ``random`` generators. Plain data
        and tensors on the host.
    """
    collector, sizes = data.leave()
    own = {
        "learner": learner.state_dict(),
        "collector": collector,
        "random": _generators(learner.policy.device),
    }
    return {
        "env_steps": learner.env_steps,
        "seed": torch.initial_seed(),
        "sizes": {**sizes, "total_envs": data.num_envs * world_size()},
        "ranks": _of_ranks(own) if world_size() > 1 else [own],
    }


def _of_ranks(own: State) -> list[State]:
    buffer = BytesIO()
    torch.save(own, buffer)
    # Ranks that share their data are alike.
    of_ranks = dict(gather((rank(), buffer.getvalue())))
    return [torch.load(BytesIO(of_ranks[number]), weights_only=True) for number in sorted(of_ranks)]


def take_up(saved: State, start: Callable[[], Learner], data: RolloutDataModule) -> None:
    """Go on from what another run left; says so if its episodes cannot.

    Args:
        saved: As of :func:`leave`.
        start: Makes a new learner.
        data: The environments, of which none has stepped.

    Raises:
        ConfigurationError: The ranks were given different checkpoints.
    """
    check_same_options({"ckpt_path's environment steps": saved["env_steps"]})
    own, seed = own_part(saved, data.num_envs), saved["seed"]
    # A rank that was not there before must not repeat what one of its number may have drawn still earlier.
    torch.manual_seed(seed if "random" in own else derive_seed(seed, f"from {saved['env_steps']} steps on"))
    learner = start()
    device = learner.policy.device
    lost = data.take_up(own["collector"], saved["env_steps"], device)
    if lost is not None:
        own = without_episodes(own, lost)
        rank_zero_info(f"Episodes under way cannot go on, so new ones begin, and all else goes on: {lost}.")
    learner.load_state_dict(own["learner"])
    if "random" in own:
        _restore_generators(own["random"], device)


def _restore_generators(state: State, device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(unpack(state["numpy"]))
    random.setstate(unpack(state["python"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def _generators(device: torch.device) -> State:
    state = {
        "torch": torch.get_rng_state(),
        "numpy": pack(np.random.get_state(legacy=False)),
        "python": pack(random.getstate()),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state
