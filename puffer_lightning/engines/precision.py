"""Which of Lightning's precisions PPO can train in, and what they mean for a policy."""

import torch

from puffer_lightning.errors import ConfigurationError


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype in which a policy computes where that is safe, None for that of its parameters.

    Args:
        precision: Lightning's name of it.

    Raises:
        ConfigurationError: It needs gradients to be scaled, which clipping by their norm does not allow.
    """
    if precision in ("16-mixed", "16-true"):
        raise ConfigurationError(
            f"trainer.precision {precision} has too small a range for gradients: set it to "
            f"{precision.replace('16', 'bf16')}."
        )
    return torch.bfloat16 if precision == "bf16-mixed" else None
