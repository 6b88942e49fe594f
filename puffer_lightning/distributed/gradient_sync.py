"""Backward passes that keep their gradients on this rank."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.errors import ConfigurationError


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them over ranks, for all but the last microbatch of a minibatch.

    Handles ``DistributedDataParallel`` and, at any depth, FSDP2 (``fully_shard``) modules; any other has
    nothing to reduce. FSDP2's switch is set back in ``finally``: left off, no later gradient would ever be
    reduced.

    Args:
        module: The outermost module, as the strategy holds it.

    Raises:
        ConfigurationError: It is DDP with a static graph, which would reduce nothing in the first minibatch.
    """
    if isinstance(module, DistributedDataParallel):
        if module.static_graph:
            raise ConfigurationError(
                "static_graph does not go with accumulate_grad_batches above 1: leave one of them out."
            )
        with module.no_sync():
            yield
        return
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        for part in sharded:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True, recurse=False)
