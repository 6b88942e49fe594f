"""Anything that is a ``gymnasium.vector.VectorEnv``."""

from puffer_lightning.envs import device as _device  # noqa: F401  (registers the environments in torch)
from puffer_lightning.envs import sanity as _sanity  # noqa: F401  (registers the sanity environments)
from puffer_lightning.envs.make import EnvSource, EnvWrapper, check_env, make_vector_env
from puffer_lightning.envs.shared_memory import EnvironmentFaultError, SharedMemoryVectorEnv, WorkerOptions

__all__ = [
    "EnvSource",
    "EnvWrapper",
    "EnvironmentFaultError",
    "SharedMemoryVectorEnv",
    "WorkerOptions",
    "check_env",
    "make_vector_env",
]
