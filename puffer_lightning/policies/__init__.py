"""Actor-critic networks, encoders and action distributions."""

from puffer_lightning.policies.actor_critic import CNNPolicy, MLPPolicy, make_policy
from puffer_lightning.policies.base import Action, Evaluation, Observations, Policy, State
from puffer_lightning.policies.cnn import ImpalaCNN, NatureCNN, is_image
from puffer_lightning.policies.encoders import MLPEncoder
from puffer_lightning.policies.heads import (
    ActionHead,
    CategoricalHead,
    GaussianHead,
    MultiCategoricalHead,
    SquashedGaussianHead,
    make_head,
)

__all__ = [
    "Action",
    "ActionHead",
    "CNNPolicy",
    "CategoricalHead",
    "Evaluation",
    "GaussianHead",
    "ImpalaCNN",
    "MLPEncoder",
    "MLPPolicy",
    "MultiCategoricalHead",
    "NatureCNN",
    "Observations",
    "Policy",
    "SquashedGaussianHead",
    "State",
    "is_image",
    "make_head",
    "make_policy",
]
