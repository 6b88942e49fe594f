"""What the callbacks ask of the module and data they are used with."""

from typing import Any, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer

from puffer_lightning.envs import EnvSource, EnvWrapper
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy
from puffer_lightning.ppo import Learner, PPOConfig


class PPOModule(Protocol):
    """The part of ``puffer_lightning.engines.PPO`` that callbacks use.

    Attributes:
        config: The coefficients.
        policy: The network, once the trainer has configured the model.
        learner: What trains it, once training has begun.
        env_steps: Environment steps trained on so far, over all ranks.
    """

    config: PPOConfig
    policy: Policy
    learner: Learner

    @property
    def env_steps(self) -> int: ...  # noqa: D102  (an attribute of the protocol)


@runtime_checkable
class RolloutData(Protocol):
    """The part of ``puffer_lightning.engines.RolloutDataModule`` that callbacks use, explained there."""

    env: EnvSource
    env_kwargs: dict[str, Any] | None
    wrappers: list[EnvWrapper]
    num_envs: int
    horizon: int
    total_timesteps: int
    eval_episodes: int
    eval_greedy: bool


def ppo_parts(trainer: Trainer, callback: Callback) -> tuple[PPOModule, RolloutData]:
    """The trainer's module and data, checked to be the ones that a callback of this package works with.

    Args:
        trainer: Already given its module, that is from the hook ``setup`` on.
        callback: Named in the message.

    Raises:
        ConfigurationError: They are others.
    """
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    if not hasattr(module, "env_steps") or not isinstance(data, RolloutData):
        raise ConfigurationError(
            f"The callback {type(callback).__name__} works with PPO and RolloutDataModule: "
            "give the Trainer these two, or take the callback out of trainer.callbacks."
        )
    return cast(PPOModule, module), data


def log_metrics(trainer: Trainer, callback: Callback, metrics: dict[str, float]) -> None:
    """Log what a callback has measured, at the run's environment steps; ``callback_metrics`` has it, too.

    Args:
        trainer: In training.
        callback: Which one.
        metrics: By their logged names.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    module, _ = ppo_parts(trainer, callback)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=module.env_steps)


def env_name(env: EnvSource) -> str:
    """What to call an environment in messages and file names: its id, or the name of its factory.

    Args:
        env: A gymnasium id or a factory.
    """
    if isinstance(env, str):
        return env
    made_by = getattr(env, "func", env)
    return str(getattr(made_by, "__name__", type(made_by).__name__))
