"""What every action head has in common: from features to a distribution over actions."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from puffer_lightning.policies.initialization import ACTION_GAIN, orthogonal


class ActionHead(nn.Module, ABC):
    """The last layer of an actor and the action distribution it parametrises.

    Only ``forward`` touches trainable parameters. Everything else is a function of ``params``, the tensor
    ``[..., P]`` that ``forward`` returned, so a sharded policy gathers its parameters once, in its own
    forward. Log-probabilities and entropies are float32 whatever the dtype of ``params``.

    Args:
        num_features: size of the features' last dimension.
        num_outputs: outputs of the last layer.
        action_shape: shape of one stored action.
        action_dtype: dtype of a stored action.
        noise_size: numbers of noise that one sample consumes.
    """

    def __init__(
        self,
        num_features: int,
        num_outputs: int,
        action_shape: tuple[int, ...],
        action_dtype: torch.dtype,
        noise_size: int,
    ) -> None:
        super().__init__()
        self.action_shape = action_shape
        self.action_dtype = action_dtype
        self.noise_size = noise_size
        self.linear = orthogonal(nn.Linear(num_features, num_outputs), ACTION_GAIN)

    def forward(self, features: Tensor) -> Tensor:
        """Return the distribution's parameters ``[..., P]`` for features ``[..., num_features]``."""
        params: Tensor = self.linear(features)
        return params

    @abstractmethod
    def fill_noise(self, noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``noise`` ``[..., noise_size]`` in place with what ``sample`` consumes.

        Drawn apart from sampling, the noise of a whole rollout takes one call, and an action depends on its
        time step and environment only, not on the order in which actions are sampled.

        Args:
            noise: a float32 tensor to fill.
            generator: source of randomness on the device of ``noise``; torch's default one if None.
        """

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions.

        Args:
            params: distribution parameters ``[..., P]``.
            noise: ``[..., noise_size]``, as ``fill_noise`` left it.

        Returns:
            Actions ``[..., *action_shape]`` of dtype ``action_dtype``, to be stored, without gradient, and
            their log-probabilities ``[...]``: bit for bit those that ``evaluate`` gives for the same
            ``params``.
        """

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """Return the greedy actions ``[..., *action_shape]`` for parameters ``[..., P]``."""

    @abstractmethod
    def evaluate(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities ``[...]`` of stored actions, and the entropies ``[...]``, in nats.

        Args:
            params: distribution parameters ``[..., P]``.
            actions: stored actions ``[..., *action_shape]``.
        """

    @abstractmethod
    def to_env(self, actions: Tensor) -> Tensor:
        """Turn stored actions ``[..., *action_shape]`` into members of the action space, in its dtype."""
