"""The coefficients of PPO."""

from dataclasses import dataclass
from typing import Literal

from puffer_lightning.errors import ConfigurationError


@dataclass
class PPOConfig:
    """Coefficients of an update; any of them may be changed between iterations.

    Source: Schulman et al. 2017, arXiv 1707.06347; names as in CleanRL.

    Attributes:
        gamma: Discount of a reward one step later, in [0, 1].
        gae_lambda: λ of generalised advantage estimation, in [0, 1].
        update_epochs: Passes over each rollout.
        num_minibatches: Optimizer steps a pass; must divide horizon × num_envs, or num_envs alone for a
            policy with memory, which is trained on whole sequences.
        accumulate_grad_batches: Backward passes a minibatch is split into, to save memory; the gradient stays
            that of the whole minibatch. Must divide the minibatch.
        clip_coef: Range ε of the clipped surrogate: the probability ratio is held within 1 ± ε.
        clip_value_loss: Hold the value estimates within ``clip_coef`` of the old ones, too.
        vf_coef: Weight of the value loss.
        ent_coef: Weight of the entropy bonus.
        max_grad_norm: Gradients are scaled down to this global norm.
        clip_rewards: Learn from rewards held within ± this, after their normalisation if there is any; null
            for as they are. The episode returns that are logged stay as the environment gave them.
        normalize_advantages: Standardise the advantages of each minibatch over all ranks ("global"), over
            each rank's part ("rank"), or not at all ("none").
        target_kl: Skip the remaining passes over a rollout once the policy has moved this far from the one
            that collected it, in nats; null for never.
        max_skipped_updates: Stop after so many iterations in a row whose update skipped a minibatch, because
            its loss or its gradients were not finite.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    update_epochs: int = 4
    num_minibatches: int = 4
    accumulate_grad_batches: int = 1
    clip_coef: float = 0.2
    clip_value_loss: bool = False
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 0.5
    clip_rewards: float | None = None
    normalize_advantages: Literal["global", "rank", "none"] = "global"
    target_kl: float | None = None
    max_skipped_updates: int = 10

    def check(self) -> None:
        """Refuse coefficients that cannot work.

        Raises:
            ConfigurationError: A coefficient is out of its range.
        """
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: set it between 0 and 1.")
        for name in ("update_epochs", "num_minibatches", "accumulate_grad_batches", "max_skipped_updates"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: set it to 1 or more.")
        for name in ("clip_coef", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: set it above 0.")
        for name in ("vf_coef", "ent_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: set it to 0 or more.")
        if self.clip_rewards is not None and not self.clip_rewards > 0:
            raise ConfigurationError(
                f"clip_rewards is {self.clip_rewards}: set it above 0, or to null for rewards as they are."
            )
        if self.target_kl is not None and not self.target_kl > 0:
            raise ConfigurationError(
                f"target_kl is {self.target_kl}: set it above 0, or to null for no stop."
            )
        if self.normalize_advantages not in ("global", "rank", "none"):
            raise ConfigurationError(
                f"normalize_advantages is {self.normalize_advantages!r}: set it to global, rank or none."
            )

    def check_sizes(self, horizon: int, num_envs: int, sequences: bool = False) -> None:
        """Refuse a rollout that does not divide into equal minibatches and microbatches.

        Args:
            horizon: T, steps of each environment in a rollout.
            num_envs: N, environments of one rank.
            sequences: The policy has a memory, so what is divided are the environments' whole sequences.

        Raises:
            ConfigurationError: A division leaves a remainder.
        """
        size, unit = (num_envs, "sequences") if sequences else (horizon * num_envs, "steps")
        if size % self.num_minibatches:
            rollout = (
                f"num_envs {num_envs}, whose whole sequences a policy with memory is trained on"
                if sequences
                else f"the rollout of horizon {horizon} × num_envs {num_envs} = {size} steps"
            )
            raise ConfigurationError(
                f"num_minibatches {self.num_minibatches} does not divide {rollout}: set it to "
                f"{_nearest_divisor(size, self.num_minibatches)}, or change the rollout."
            )
        minibatch = size // self.num_minibatches
        if minibatch % self.accumulate_grad_batches:
            raise ConfigurationError(
                f"accumulate_grad_batches {self.accumulate_grad_batches} does not divide the minibatch of "
                f"{minibatch} {unit}: set it to {_nearest_divisor(minibatch, self.accumulate_grad_batches)}."
            )


def _nearest_divisor(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - wanted))
