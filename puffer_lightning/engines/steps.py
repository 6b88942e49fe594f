"""Backward passes and optimizer steps under the Trainer, without the hooks that nobody listens to."""

from collections.abc import Callable
from typing import Any, cast

import lightning as L
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from puffer_lightning.engines.profiling import PhaseProfiler
from puffer_lightning.engines.strategies import DDP

_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def backward_and_optimizer(module: L.LightningModule) -> tuple[Callable[[Tensor], object] | None, Optimizer]:
    """How the module runs a backward pass, and its optimizer.

    Around both, Lightning calls hooks of the module and of every callback, scales the loss for 16-bit
    precision and prepares DDP. On one device, or with DDP, in plain precision, where nothing overrides the
    hooks, they are 60 µs or more a minibatch for nothing: then it is torch's own backward, for which DDP is
    prepared, and an optimizer that merely counts its steps for ``trainer.global_step``. The numbers are the
    same.

    Args:
        module: Attached to a Trainer, in manual optimization, with one optimizer.

    Returns:
        The backward pass, None for torch's own that nothing has to be prepared for, and the optimizer.
    """
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    if _is_heard(module):
        return module.manual_backward, cast(Optimizer, optimizer)
    strategy = module.trainer.strategy
    if type(strategy) is SingleDeviceStrategy:
        return None, cast(Optimizer, _CountingOptimizer(optimizer))

    def backward(loss: Tensor) -> None:
        strategy.pre_backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    return backward, cast(Optimizer, _CountingOptimizer(optimizer))


def _is_heard(module: L.LightningModule) -> bool:
    trainer = module.trainer
    if getattr(trainer.strategy.model, "static_graph", False):
        # DDP then has the first backward pass end in a way of its own.
        return True
    return not (
        type(trainer.strategy) in (SingleDeviceStrategy, DDP)
        and type(trainer.strategy.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler | PhaseProfiler)  # type: ignore[attr-defined]
        and not any(is_overridden(hook, module, L.LightningModule) for hook in (*_HOOKS, "backward"))
        and not any(is_overridden(hook, c, L.Callback) for hook in _HOOKS for c in trainer.callbacks)  # type: ignore[attr-defined]
    )


def fabric_backward(fabric: Fabric) -> Callable[[Tensor], object] | None:
    """Fabric's backward pass, or None where that is torch's own and nobody is told of optimizer steps."""
    plain = (
        type(fabric.strategy) is FabricSingleDevice
        and type(fabric.strategy.precision) is FabricPrecision
        and not any(hasattr(callback, "on_after_optimizer_step") for callback in fabric._callbacks)
    )
    return None if plain else fabric.backward


class _CountingOptimizer:
    """A torch optimizer whose steps the Trainer counts."""

    def __init__(self, optimizer: LightningOptimizer) -> None:
        self._counted, self.optimizer = optimizer, optimizer.optimizer
        self.zero_grad = self.optimizer.zero_grad

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self._counted._on_before_step()
        self.optimizer.step()
        self._counted._on_after_step()

    def count_step(self) -> None:
        """Count a step that was taken past it."""
        self._counted._on_before_step()
        self._counted._on_after_step()
