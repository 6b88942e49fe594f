"""Lightning callbacks: progress display, evaluation report, films, recorded episodes, checkpoints."""

from puffer_lightning.callbacks.checkpoint import Checkpoint
from puffer_lightning.callbacks.episodes import EpisodeWriter
from puffer_lightning.callbacks.evaluation import EvaluationReport
from puffer_lightning.callbacks.progress import Progress
from puffer_lightning.callbacks.video import Video

__all__ = ["Checkpoint", "EpisodeWriter", "EvaluationReport", "Progress", "Video"]
