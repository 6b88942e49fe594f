"""Actor-critic networks, encoders and action distributions."""

from puffer_lightning.policies.action_head import Actions
from puffer_lightning.policies.actor_critic import CNNPolicy, MLPPolicy, MultiInputPolicy, make_policy
from puffer_lightning.policies.base import Action, Evaluation, Observations, Policy, State
from puffer_lightning.policies.cnn import ImpalaCNN, NatureCNN, is_image
from puffer_lightning.policies.encoders import MLPEncoder
from puffer_lightning.policies.heads import (
    ActionHead,
    CategoricalHead,
    GaussianHead,
    HybridHead,
    LinearHead,
    MultiCategoricalHead,
    SquashedGaussianHead,
    make_head,
)
from puffer_lightning.policies.masking import (
    ACTION_MASK,
    MaskedObservations,
    MaskLayout,
    unmasked,
    without_mask,
)
from puffer_lightning.policies.multi_input import MultiInputEncoder
from puffer_lightning.policies.normalization import ObservationNormalizer, RewardNormalizer
from puffer_lightning.policies.per_type import (
    AGENT_TYPE,
    PerTypeNormalizer,
    PerTypePolicy,
    make_normalizer,
    make_policies,
)
from puffer_lightning.policies.recurrent import LSTMPolicy
from puffer_lightning.policies.transformer import TransformerPolicy

__all__ = [
    "ACTION_MASK",
    "AGENT_TYPE",
    "Action",
    "ActionHead",
    "Actions",
    "CNNPolicy",
    "CategoricalHead",
    "Evaluation",
    "GaussianHead",
    "HybridHead",
    "ImpalaCNN",
    "LSTMPolicy",
    "LinearHead",
    "MLPEncoder",
    "MLPPolicy",
    "MaskLayout",
    "MaskedObservations",
    "MultiCategoricalHead",
    "MultiInputEncoder",
    "MultiInputPolicy",
    "NatureCNN",
    "ObservationNormalizer",
    "Observations",
    "PerTypeNormalizer",
    "PerTypePolicy",
    "Policy",
    "RewardNormalizer",
    "SquashedGaussianHead",
    "State",
    "TransformerPolicy",
    "is_image",
    "make_head",
    "make_normalizer",
    "make_policies",
    "make_policy",
    "unmasked",
    "without_mask",
]
