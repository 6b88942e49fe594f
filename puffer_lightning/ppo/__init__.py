"""Proximal policy optimization: its coefficients, its update and its state, which know no engine."""

from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.learner import Learner, Metrics
from puffer_lightning.ppo.loss import minibatch_loss
from puffer_lightning.ppo.sentinel import NonFiniteError
from puffer_lightning.ppo.update import update

__all__ = ["Learner", "Metrics", "NonFiniteError", "PPOConfig", "minibatch_loss", "update"]
