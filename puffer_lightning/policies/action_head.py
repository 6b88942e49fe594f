"""What every action head has in common: from features to a distribution over actions."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from puffer_lightning.policies.initialization import ACTION_GAIN, orthogonal

Actions = Any
"""Stored actions: a tensor, or a pytree of tensors for Dict and Tuple spaces; leading dimensions first."""


class ActionHead(nn.Module, ABC):
    """The last layer of an actor and the action distribution it parametrises.

    Only ``forward`` touches trainable parameters. Everything else is a function of ``params``, the tensor
    ``[..., P]`` that ``forward`` returned, so a sharded policy gathers its parameters once, in its own
    forward. Log-probabilities and entropies are float32 whatever the dtype of ``params``.

    Args:
        num_params: size P of the distribution parameters' last dimension.
        noise_size: numbers of noise that one sample consumes.
        num_choices: entries of an action mask, one for each value of each discrete factor; 0 if none is.
    """

    def __init__(self, num_params: int, noise_size: int, num_choices: int = 0) -> None:
        super().__init__()
        self.num_params = num_params
        self.noise_size = noise_size
        self.num_choices = num_choices

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Return the distribution's parameters ``[..., P]`` for features ``[..., num_features]``."""

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
    def empty_actions(self, *leading: int, device: torch.device | str | None = None) -> Actions:
        """Return zeros in the shape, dtype and nesting of stored actions ``[*leading, ...]``."""

    def mask(self, params: Tensor, action_mask: Tensor) -> Tensor:
        """Return the parameters of the distribution in which masked actions have probability exactly 0.

        Args:
            params: distribution parameters ``[..., P]``.
            action_mask: ``[..., num_choices]`` bool, False where a value may not be chosen, in the order of
                ``MaskLayout``; each factor has at least one True.
        """
        raise AssertionError(f"{type(self).__name__} has nothing to mask")

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> tuple[Actions, Tensor]:
        """Sample actions.

        Args:
            params: distribution parameters ``[..., P]``.
            noise: ``[..., noise_size]``, as ``fill_noise`` left it.

        Returns:
            Actions, to be stored, as ``empty_actions`` has them, without gradient, and their
            log-probabilities ``[...]``: bit for bit those that ``evaluate`` gives for the same ``params``.
        """

    @abstractmethod
    def mode(self, params: Tensor) -> Actions:
        """Return the greedy actions, to be stored, for parameters ``[..., P]``."""

    @abstractmethod
    def evaluate(self, params: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities ``[...]`` of stored actions, and the entropies ``[...]``, in nats.

        Args:
            params: distribution parameters ``[..., P]``.
            actions: stored actions.
        """

    @abstractmethod
    def to_env(self, actions: Actions) -> Actions:
        """Turn stored actions into members of the action space, in its dtypes."""


class LinearHead(ActionHead):
    """A head for an action that is one array: a linear layer, and actions that are one tensor.

    Args:
        num_features: size of the features' last dimension.
        num_outputs: outputs of the last layer.
        action_shape: shape of one stored action.
        action_dtype: dtype of a stored action.
        noise_size: numbers of noise that one sample consumes.
        num_params: size of the distribution parameters' last dimension; ``num_outputs`` if not given.
        num_choices: see ``ActionHead``.
    """

    def __init__(
        self,
        num_features: int,
        num_outputs: int,
        action_shape: tuple[int, ...],
        action_dtype: torch.dtype,
        noise_size: int,
        num_params: int | None = None,
        num_choices: int = 0,
    ) -> None:
        super().__init__(num_params or num_outputs, noise_size, num_choices)
        self.action_shape = action_shape
        self.action_dtype = action_dtype
        self.linear = orthogonal(nn.Linear(num_features, num_outputs), ACTION_GAIN)

    def forward(self, features: Tensor) -> Tensor:
        """Return the distribution's parameters ``[..., P]`` for features ``[..., num_features]``."""
        params: Tensor = self.linear(features)
        return params

    def empty_actions(self, *leading: int, device: torch.device | str | None = None) -> Tensor:
        """Return zeros ``[*leading, *action_shape]`` of ``action_dtype``."""
        return torch.zeros(*leading, *self.action_shape, dtype=self.action_dtype, device=device)
