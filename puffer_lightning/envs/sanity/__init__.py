"""The sanity suite: tiny vector environments that each catch one class of PPO bug in seconds on a CPU.

Importing this package registers them with gymnasium, for ``gymnasium.make_vec("puffer/Bandit-v0", ...)``.
"""

from __future__ import annotations

import gymnasium

from puffer_lightning.envs.sanity.bandits import Bandit, Stochastic
from puffer_lightning.envs.sanity.base import SanityVectorEnv
from puffer_lightning.envs.sanity.credit import DelayedCredit, Password
from puffer_lightning.envs.sanity.endings import ResetStep, TerminatedValue, TruncatedValue
from puffer_lightning.envs.sanity.grid import Squared
from puffer_lightning.envs.sanity.matching import ContinuousTarget, ImageTarget, MultiDiscreteMatch

__all__ = [
    "SANITY_ENVS",
    "Bandit",
    "ContinuousTarget",
    "DelayedCredit",
    "ImageTarget",
    "MultiDiscreteMatch",
    "Password",
    "ResetStep",
    "SanityVectorEnv",
    "Squared",
    "Stochastic",
    "TerminatedValue",
    "TruncatedValue",
    "register_sanity_envs",
]

SANITY_ENVS: dict[str, type[SanityVectorEnv]] = {
    f"puffer/{cls.__name__}-v0": cls
    for cls in (
        Bandit,
        Stochastic,
        Password,
        Squared,
        DelayedCredit,
        TruncatedValue,
        TerminatedValue,
        ResetStep,
        ContinuousTarget,
        ImageTarget,
        MultiDiscreteMatch,
    )
}
"""Every sanity environment by its gymnasium id."""


def register_sanity_envs() -> None:
    """Register the suite with gymnasium under ``puffer/``, as vector environments; again is harmless."""
    for env_id, cls in SANITY_ENVS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, vector_entry_point=f"{__name__}:{cls.__name__}")


register_sanity_envs()
