"""What a Trainer's strategy has to say on processes: whether it can have them, and whether it starts them."""

import os
import socket
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_warn

from puffer_lightning.distributed import TIMEOUT, TORCH_TIMEOUT, has_backend, rejoin
from puffer_lightning.errors import ConfigurationError


def prepare_processes(trainer: Trainer) -> None:
    """Refuse processes that cannot come together; prepare those that can.

    Args:
        trainer: Before it has started any.

    Raises:
        ConfigurationError: Somebody else has started more or fewer of them, or they cannot talk.
    """
    strategy: Any = trainer.strategy
    launcher = strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return
    cluster, devices, nodes = launcher.cluster_environment, trainer.num_devices, trainer.num_nodes
    if cluster.creates_processes_externally and cluster.world_size() not in (1, devices * nodes):
        raise ConfigurationError(
            f"{cluster.world_size()} processes were started, but trainer.devices {devices} × "
            f"trainer.num_nodes {nodes} are {devices * nodes}: make these as many."
        )
    on_cuda = strategy.root_device.type == "cuda"
    backend = getattr(strategy, "process_group_backend", None) or ("nccl" if on_cuda else "gloo")
    if not has_backend(backend) or (backend == "nccl" and not on_cuda):
        raise ConfigurationError(
            f"process_group_backend of trainer.strategy is {backend}, which "
            + ("needs GPUs" if backend == "nccl" else "this torch is built without")
            + ": leave it out, or set it to gloo."
        )
    if not on_cuda and devices > (processors := os.cpu_count() or 1):
        rank_zero_warn(
            f"trainer.devices {devices} are more processes than the {processors} processors here: they will "
            "take turns.",
        )
    if getattr(strategy, "_timeout", None) == TORCH_TIMEOUT:
        strategy._timeout = TIMEOUT
    rejoin(backend, getattr(strategy, "_timeout", TIMEOUT))


def ranks_to_launch(trainer: Trainer) -> tuple[int, int, dict[str, str]] | None:
    """The ranks that Lightning would start, or None if it would not, or not as processes of the same command.

    Args:
        trainer: Before it has started any.

    Returns:
        How many on this machine, the number of the first, and what they have to find in their environment.

    Raises:
        ConfigurationError: They could not meet where they are told to.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return None
    cluster = launcher.cluster_environment
    if cluster.creates_processes_externally:
        return None
    if cluster.node_rank() == 0:
        _check_port(cluster.main_port)
    environment = {
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": str(cluster.main_port),
        "NODE_RANK": str(cluster.node_rank()),
        "WORLD_SIZE": str(trainer.num_devices * trainer.num_nodes),
    }
    return trainer.num_devices, cluster.node_rank() * trainer.num_devices, environment


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as problem:
            raise ConfigurationError(
                f"MASTER_PORT {port} cannot be used ({problem.strerror}): set it to a free port, or leave it "
                "out to have one chosen."
            ) from problem
