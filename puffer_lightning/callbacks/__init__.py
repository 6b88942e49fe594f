"""Lightning callbacks: progress and reports, films, recorded episodes, checkpoints, threads."""

from puffer_lightning.callbacks.checkpoint import Checkpoint
from puffer_lightning.callbacks.communication import CommunicationMonitor
from puffer_lightning.callbacks.episodes import EpisodeWriter
from puffer_lightning.callbacks.evaluation import EvaluationReport
from puffer_lightning.callbacks.gpu import GPUMonitor
from puffer_lightning.callbacks.progress import Progress
from puffer_lightning.callbacks.resuming import RunOptions, find_checkpoint
from puffer_lightning.callbacks.signals import StopOnSignal
from puffer_lightning.callbacks.stragglers import Stragglers
from puffer_lightning.callbacks.threads import Threads
from puffer_lightning.callbacks.video import Video

__all__ = [
    "Checkpoint",
    "CommunicationMonitor",
    "EpisodeWriter",
    "EvaluationReport",
    "GPUMonitor",
    "Progress",
    "RunOptions",
    "StopOnSignal",
    "Stragglers",
    "Threads",
    "Video",
    "find_checkpoint",
]
