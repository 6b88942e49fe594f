"""Environments in worker processes that share memory with the trainer."""

from puffer_lightning.envs.shared_memory.arguments import WorkerOptions
from puffer_lightning.envs.shared_memory.faults import EnvironmentFaultError, EnvironmentFaultWarning, Fault
from puffer_lightning.envs.shared_memory.vector_env import SharedMemoryVectorEnv

__all__ = [
    "EnvironmentFaultError",
    "EnvironmentFaultWarning",
    "Fault",
    "SharedMemoryVectorEnv",
    "WorkerOptions",
]
