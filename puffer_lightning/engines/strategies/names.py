"""Lightning's names of strategies."""

from typing import Any


def take_names(registry: Any, theirs: type, ours: type) -> None:
    """Let each name that stands for Lightning's strategy (ddp, ddp_notebook, ...) stand for ours.

    Args:
        registry: The Trainer's or Fabric's.
        theirs: Lightning's strategy.
        ours: What takes its place.
    """
    for name, entry in list(registry.items()):
        if entry["strategy"] is theirs:
            registry.register(name, ours, entry["description"], override=True, **entry["init_params"])
