"""``DDP`` and ``FabricDDP``: Lightning's data-parallel strategies, compressing gradients if asked to."""

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from puffer_lightning.distributed import CommHook, Compression, exchange_gradients
from puffer_lightning.engines.strategies.names import take_names
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy


class _Options:
    """What ``DDP`` and ``FabricDDP`` add to Lightning's strategies, which come after it in their MROs."""

    def __init__(
        self,
        comm_hook: CommHook = "none",
        bucket_cap_mb: float = 25.0,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        if comm_hook not in ("none", "fp16", "bf16", "powersgd"):
            raise ConfigurationError(f"comm_hook is {comm_hook!r}: set it to none, fp16, bf16 or powersgd.")
        super().__init__(  # type: ignore[call-arg]
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            **options,
        )
        self.compression = None if comm_hook == "none" else Compression(comm_hook)

    def _prepare(self, wrapped: DistributedDataParallel) -> DistributedDataParallel:
        if any(isinstance(module, Policy) for module in wrapped.modules()):
            # What a policy keeps in buffers is over all ranks already. Not by the argument of this name, with
            # which DDP would not send rank 0's buffers at the start either.
            wrapped.broadcast_buffers = False
        if self.compression is not None:
            self.compression.register(wrapped)
        else:
            exchange_gradients(wrapped)
        return wrapped


class DDP(_Options, DDPStrategy):
    """The Trainer's ``ddp``: a replica of the policy on each rank, gradients averaged over ranks.

    Args:
        comm_hook: Send gradients as ``fp16``, as ``bf16`` or as low-rank approximations (``powersgd``), on
            GPUs and CPUs alike; how many bytes that saved is said when training ends.
        bucket_cap_mb: Gradients are sent in pieces of so many MiB, each as soon as it is complete.
        gradient_as_bucket_view: Keep gradients in the memory from which they are sent.
        static_graph: Promise that every backward pass uses the same parameters in the same order; not with
            ``accumulate_grad_batches``.
        find_unused_parameters: Look in each backward pass for parameters that it does not use.
        options: Of Lightning's ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.

    Attributes:
        compression: What ``comm_hook`` has saved so far; None without.

    Raises:
        ConfigurationError: There is no such ``comm_hook``.
    """

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        return self._prepare(super()._setup_model(model))

    @override
    def teardown(self) -> None:
        if self.compression is not None and isinstance(self.model, DistributedDataParallel):
            rank_zero_info(str(self.compression))
        super().teardown()


class FabricDDP(_Options, FabricDDPStrategy):
    """Fabric's ``ddp``; arguments and attributes as of :class:`DDP`."""

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        return self._prepare(super().setup_module(module))


take_names(StrategyRegistry, DDPStrategy, DDP)
take_names(STRATEGY_REGISTRY, FabricDDPStrategy, FabricDDP)
