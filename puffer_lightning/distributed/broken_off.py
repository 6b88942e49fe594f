"""Reductions of gradients that a backward pass broke off before they were done."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.errors import ConfigurationError


def finish_reduction(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Reduce over ranks what other ranks are waiting for, after a backward pass that failed on this one.

    DDP sends a gradient as soon as the backward pass has it. Those that it has not been given yet are given
    to it by a backward pass that adds 0 to them.

    Args:
        module: The outermost module, as the strategy holds it. Nothing is done unless it is
            ``DistributedDataParallel``.
        parameters: Those whose gradients DDP has not been given, and which hold them in ``grad``.

    Raises:
        ConfigurationError: It is DDP with a static graph, which does not know this other pass.
    """
    if not isinstance(module, DistributedDataParallel):
        return
    if module.static_graph:
        raise ConfigurationError(
            "Out of memory, and static_graph does not let this rank begin anew: leave static_graph out."
        )
    if len(parameters) == sum(parameter.requires_grad for parameter in module.parameters()):
        # The pass may have failed before DDP was prepared for it, and it may be prepared twice.
        module.reducer._rebuild_buckets()
        module.reducer.prepare_for_backward([])
    nothing = sum((parameter * 0.0).sum() for parameter in parameters)
    nothing.backward()  # type: ignore[union-attr]
