"""``FSDP`` and ``FabricFSDP``: a policy's parameters sharded over ranks, its layers divided among them."""

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.fsdp import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from typing_extensions import override

from puffer_lightning import files
from puffer_lightning.distributed import (
    CheckpointException,
    Sharding,
    check_folder,
    finish_folder,
    lost_connection,
    set_data_parallel,
    shard,
    split_layers,
)
from puffer_lightning.engines.strategies.names import take_names
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sharded:
    """What ``FSDP`` and ``FabricFSDP`` add to Lightning's strategies, which come after it in their MROs.

    Arguments as of :class:`FSDP`.
    """

    device_mesh: "DeviceMesh"
    _data_parallel_size: Literal["auto"] | int
    num_nodes: int
    num_processes: int
    root_device: torch.device

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        mixed_precision: bool = False,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        unshard_for_rollout: bool = True,
        save_distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **options,
        )
        self._sharding = Sharding(
            mixed_precision,
            cpu_offload,
            reshard_after_forward,
            activation_checkpointing,
            unshard_for_rollout,
        )
        self.tensor_parallel_size = tensor_parallel_size

    def setup_environment(self) -> None:
        """Arrange the ranks in a mesh, data-parallel × tensor-parallel.

        Raises:
            ConfigurationError: Their number is not the product of the two sizes.
        """
        ranks = self.num_nodes * self.num_processes
        rows, columns = self._data_parallel_size, self.tensor_parallel_size
        if rows == "auto":
            rows = max(1, ranks // columns)
        if rows * columns != ranks:
            raise ConfigurationError(
                f"data_parallel_size {rows} × tensor_parallel_size {columns} is not the number of ranks, "
                f"{ranks}: set tensor_parallel_size to a divisor of it, and data_parallel_size to auto."
            )
        self._data_parallel_size = rows
        super().setup_environment()  # type: ignore[misc]
        set_data_parallel(self.device_mesh["data_parallel"].get_group())

    def teardown(self) -> None:
        """Forget the mesh."""
        super().teardown()  # type: ignore[misc]
        set_data_parallel(None)

    def _check(self, checkpoint_path: str | Path) -> None:
        if "://" not in str(checkpoint_path):
            path = Path(checkpoint_path)
            check_folder(path) if path.is_dir() else files.load(path, mmap=True)

    def _divide(self, policy: Policy) -> None:
        if policy.sharding is not None:
            # A Trainer sets up the same policy again, to evaluate what it has trained.
            return
        if self._sharding.cpu_offload:
            policy.offloaded_from = self.root_device
        tensor_parallel = self.device_mesh["tensor_parallel"]
        if tensor_parallel.size() > 1:
            split_layers(policy, policy.split(tensor_parallel.size()), tensor_parallel)
        shard(policy, policy.shards(), self.device_mesh["data_parallel"], self._sharding)
        policy.sharding = self._sharding
        # Nobody does what it warns of, to change what a policy returns in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class FSDP(Sharded, ModelParallelStrategy):
    """The Trainer's ``fsdp``: parameters, gradients and optimizer states are sharded over ranks.

    FSDP2, on GPUs and CPUs. The blocks of a ``TransformerPolicy`` are gathered one at a time, other policies
    as a whole. With ``tensor_parallel_size`` above 1 each layer of such a block is also divided among so many
    ranks, which then share environments and random numbers.

    Args:
        data_parallel_size: Ranks, or groups of ranks, that have environments of their own; ``auto`` for as
            many as there are.
        tensor_parallel_size: Ranks among which each layer is divided.
        mixed_precision: Gather parameters in bfloat16 and compute in it; gradients are reduced in float32.
        cpu_offload: Keep parameters and optimizer states in host memory while they are not used.
        reshard_after_forward: Free a block's gathered parameters until its backward pass.
        activation_checkpointing: Keep only what goes into a block, and compute the rest of it again in the
            backward pass.
        unshard_for_rollout: Gather the whole policy once for a rollout, instead of each block at each of its
            steps; takes the memory of all parameters.
        save_distributed_checkpoint: Each rank writes its own part of a checkpoint, which is a folder, instead
            of rank 0 a file of the whole.
        options: Of Lightning's ``ModelParallelStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        ConfigurationError: The sizes do not fit the number of ranks, or the policy's layers cannot be
            divided.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        policy = self.lightning_module.policy
        assert isinstance(policy, Policy)
        self._divide(policy)
        super().setup(trainer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        partial = path.with_name(path.name + files.PARTIAL)
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        self.barrier()
        failure = None
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
        except (CheckpointException, OSError, RuntimeError) as problem:
            if lost_connection(problem):
                raise
            failure = str(problem)
        finish_folder(partial, path, failure)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._check(checkpoint_path)
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=True)
        except (CheckpointException, KeyError, RuntimeError, ValueError) as problem:
            failures = problem.failures.values() if isinstance(problem, CheckpointException) else [(problem,)]
            reason = " ".join(str(next(iter(failures))[0]).split())
            raise ConfigurationError(
                f"ckpt_path cannot be loaded into this policy ({reason}): use the model.policy, data.env and "
                "model.normalize_… options it was trained with."
            ) from problem


class FabricFSDP(Sharded, FabricModelParallelStrategy):
    """Fabric's ``fsdp``; arguments as of :class:`FSDP`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, parallelize_fn=self._parallelized, **options)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._check(path)
        return super().load_checkpoint(path, state, strict, weights_only=True)

    def _parallelized(self, policy: Policy, mesh: "DeviceMesh") -> Policy:
        self._divide(policy)
        return policy


take_names(StrategyRegistry, FSDPStrategy, FSDP)
take_names(STRATEGY_REGISTRY, FabricFSDPStrategy, FabricFSDP)
# By these names the Trainer knows what to refuse on a CPU.
FSDPStrategy.get_registered_strategies().clear()
