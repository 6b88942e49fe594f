"""PPO reinforcement learning at PufferLib speed, as a set of PyTorch Lightning plug-ins."""

from importlib.metadata import version

__version__ = version("puffer-lightning")
