"""The policies that come with the package, and the choice among them."""

from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from puffer_lightning.policies.base import Part, Policy, State
from puffer_lightning.policies.cnn import is_image
from puffer_lightning.policies.encoders import Activation, MLPEncoder
from puffer_lightning.policies.heads import make_head
from puffer_lightning.policies.initialization import VALUE_GAIN, orthogonal
from puffer_lightning.policies.multi_input import MultiInputEncoder, Network, has_images, image_encoder


class MLPPolicy(Policy):
    """An actor and a critic that are multi-layer perceptrons.

    Args:
        observation_space: the observation space of one environment; the parts of a Dict or Tuple are
            flattened and laid side by side, discrete ones as one-hot vectors.
        action_space: the action space of one environment.
        hidden_sizes: Units of each hidden layer.
        activation: Activation function after each hidden layer.
        shared: Share the hidden layers between actor and critic, instead of giving each its own.
        squash_actions: Squash the actions of a Box space by tanh to its bounds, instead of clipping them.
        log_std_init: Initial logarithm of the standard deviation of the actions of a Box space.

    Raises:
        ConfigurationError: if a space is not supported, or an option does not fit.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden_sizes: tuple[int, ...] = (64, 64),
        activation: Activation = "tanh",
        shared: bool = False,
        squash_actions: bool = False,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = MLPEncoder(observation_space, hidden_sizes, activation)
        self.critic_encoder = None if shared else MLPEncoder(observation_space, hidden_sizes, activation)
        # Nor where a subclass has a forward of its own, which need not know of parts.
        self.separate_critic = not shared and type(self).forward is MLPPolicy.forward
        self.head = make_head(self.encoder.num_features, action_space, squash_actions, log_std_init)
        self.critic = orthogonal(nn.Linear(self.encoder.num_features, 1), VALUE_GAIN)

    def forward(
        self, observations: Any, state: State = (), part: Part | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """Return distribution parameters ``[..., P]``, values ``[...]`` and the state as it came.

        Args:
            observations: observations with any leading dimensions.
            state: ``()``; this policy remembers nothing.
            part: what alone is needed, if hidden layers are not shared.
        """
        if self.critic_encoder is None:
            features = self.encoder(observations)
            return self.head(features), self.critic(features).squeeze(-1), state
        nothing = self.critic.weight.new_empty(0)
        params = nothing if part == "critic" else self.head(self.encoder(observations))
        values = nothing if part == "actor" else self.critic(self.critic_encoder(observations)).squeeze(-1)
        return params, values, state


class CNNPolicy(Policy):
    """An actor and a critic that share a convolutional network.

    Args:
        observation_space: the observation space of one environment: images.
        action_space: the action space of one environment.
        network: Convolutional network: that of DQN ("nature", fast) or the residual one of IMPALA ("impala").
        hidden_size: Units of the linear layer after the convolutions.
        squash_actions: Squash the actions of a Box space by tanh to its bounds, instead of clipping them.
        log_std_init: Initial logarithm of the standard deviation of the actions of a Box space.

    Raises:
        ConfigurationError: if a space is not supported, or an option does not fit.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        network: Network = "nature",
        hidden_size: int = 512,
        squash_actions: bool = False,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = image_encoder(network)(observation_space, hidden_size)
        self.head = make_head(hidden_size, action_space, squash_actions, log_std_init)
        self.critic = orthogonal(nn.Linear(hidden_size, 1), VALUE_GAIN)

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        """Return distribution parameters ``[B, P]``, values ``[B]`` and the state as it came.

        Args:
            observations: images ``[B, *observation_space.shape]``.
            state: ``()``; this policy remembers nothing.
        """
        features = self.encoder(observations)
        return self.head(features), self.critic(features).squeeze(-1), state


class MultiInputPolicy(Policy):
    """An actor and a critic that share a ``MultiInputEncoder``: images through CNNs, the rest through an MLP.

    Args:
        observation_space: the observation space of one environment: Dict or Tuple, nested at will.
        action_space: the action space of one environment.
        network: Convolutional network: that of DQN ("nature", fast) or the residual one of IMPALA ("impala").
        image_size: Features that each image is encoded in.
        vector_sizes: Units of each layer of the MLP that encodes all but the images.
        hidden_size: Units of the layer that joins images and the rest.
        squash_actions: Squash the actions of Box spaces by tanh to their bounds, instead of clipping them.
        log_std_init: Initial logarithm of the standard deviation of the actions of Box spaces.

    Raises:
        ConfigurationError: if a space is not supported, or an option does not fit.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        network: Network = "nature",
        image_size: int = 256,
        vector_sizes: tuple[int, ...] = (64,),
        hidden_size: int = 256,
        squash_actions: bool = False,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = MultiInputEncoder(observation_space, network, image_size, vector_sizes, hidden_size)
        self.head = make_head(hidden_size, action_space, squash_actions, log_std_init)
        self.critic = orthogonal(nn.Linear(hidden_size, 1), VALUE_GAIN)

    def forward(self, observations: Any, state: State = ()) -> tuple[Tensor, Tensor, State]:
        """Return distribution parameters ``[B, P]``, values ``[B]`` and the state as it came.

        Args:
            observations: a batch of observations, leading dimension B.
            state: ``()``; this policy remembers nothing.
        """
        features = self.encoder(observations)
        return self.head(features), self.critic(features).squeeze(-1), state


def make_policy(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Policy:
    """Build the default policy for a task.

    A ``CNNPolicy`` for uint8 images, a ``MultiInputPolicy`` for Dict and Tuple observations with such images
    among them, else an ``MLPPolicy``.

    Args:
        observation_space: the observation space of one environment.
        action_space: the action space of one environment.

    Raises:
        ConfigurationError: if a space is not supported.
    """
    if is_image(observation_space):
        return CNNPolicy(observation_space, action_space)
    policy = MultiInputPolicy if has_images(observation_space) else MLPPolicy
    return policy(observation_space, action_space)
