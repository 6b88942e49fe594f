"""Policy × environments: the ``Rollout``, the ``Collector`` that fills it, episodes and minibatches."""

from puffer_lightning.rollout.batch_stepper import Overlap, check_overlap
from puffer_lightning.rollout.collector import Actor, Collector
from puffer_lightning.rollout.episodes import finished_episodes
from puffer_lightning.rollout.evaluation import Episodes, Trajectory, play
from puffer_lightning.rollout.minibatches import CACHED_ROWS, Batch, flatten, make_batch, shuffled_indices
from puffer_lightning.rollout.overlapped import OverlappedCollector
from puffer_lightning.rollout.phases import Measure, unmeasured
from puffer_lightning.rollout.rollout import Rollout
from puffer_lightning.rollout.statistics import EpisodeStatistics, deal_statistics, episode_means

__all__ = [
    "CACHED_ROWS",
    "Actor",
    "Batch",
    "Collector",
    "EpisodeStatistics",
    "Episodes",
    "Measure",
    "Overlap",
    "OverlappedCollector",
    "Rollout",
    "Trajectory",
    "check_overlap",
    "deal_statistics",
    "episode_means",
    "finished_episodes",
    "flatten",
    "make_batch",
    "play",
    "shuffled_indices",
    "unmeasured",
]
