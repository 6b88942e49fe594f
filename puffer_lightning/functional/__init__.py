"""Pure tensor functions: every formula of PPO once, each with its source."""

from puffer_lightning.functional.advantages import gae, running_returns
from puffer_lightning.functional.diagnostics import (
    approx_kl,
    clip_fraction,
    explained_variance,
    explained_variance_from_sums,
    explained_variance_sums,
)
from puffer_lightning.functional.losses import clipped_surrogate, value_loss
from puffer_lightning.functional.normalization import masked_sums, mean_and_std, standardize
from puffer_lightning.functional.schedules import (
    SCHEDULES,
    WARM_UP_START,
    constant,
    cosine,
    linear,
    warm_up,
)
from puffer_lightning.functional.stragglers import straggler_metrics

__all__ = [
    "SCHEDULES",
    "WARM_UP_START",
    "approx_kl",
    "clip_fraction",
    "clipped_surrogate",
    "constant",
    "cosine",
    "explained_variance",
    "explained_variance_from_sums",
    "explained_variance_sums",
    "gae",
    "linear",
    "masked_sums",
    "mean_and_std",
    "running_returns",
    "standardize",
    "straggler_metrics",
    "value_loss",
    "warm_up",
]
