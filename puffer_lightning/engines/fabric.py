"""The same loop as the Trainer's, as a generator that a notebook or script steps."""

from collections.abc import Iterator
from functools import partial
from typing import cast

from lightning.fabric import Fabric
from torch.optim import Optimizer

from puffer_lightning.distributed import finish_reduction, no_sync
from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.module import PPO
from puffer_lightning.engines.precision import autocast_dtype
from puffer_lightning.policies import Policy
from puffer_lightning.ppo import Metrics


def iterations(fabric: Fabric, model: PPO, data: RolloutDataModule) -> Iterator[Metrics]:
    """Train, one iteration (a rollout and the update on it) for each ``next``.

    Between two iterations anything may be looked at or changed: ``model.config.ent_coef = 0.0`` counts from
    the next one on, ``data.evaluate(model.policy)`` plays episodes. With the same seed
    (``fabric.seed_everything``) the numbers are those of the Trainer, bit for bit.

    Args:
        fabric: Launched already, if it has several processes.
        model: The coefficients, policy and optimizer.
        data: The environments. They stay open; ``data.close()`` closes them.

    Yields:
        The iteration's metrics, see :meth:`~puffer_lightning.ppo.Learner.learn`.

    Raises:
        ConfigurationError: The coefficients do not fit the rollout, or the policy the spaces.
    """
    model.build(data)
    model.policy.autocast = autocast_dtype(fabric.strategy.precision.precision)
    model.policy.to(fabric.device)
    learner = model.start()
    # One after the other: an optimizer needs the parameters that the strategy leaves.
    policy = fabric.setup_module(model.policy)
    policy.mark_forward_method("evaluate")
    optimizer, scheduler = model.make_optimizer(data)
    fabric_optimizer = cast(Optimizer, fabric.setup_optimizers(optimizer))
    while learner.env_steps < data.total_timesteps:
        metrics = learner.learn(
            data.collect(model.policy, learner.act),
            fabric_optimizer,
            backward=fabric.backward,
            # Not policy.module, which is the policy under the strategy's wrapper.
            no_sync=partial(no_sync, policy._forward_module),
            finish=partial(finish_reduction, policy._forward_module),
            policy=cast(Policy, policy),
        )
        scheduler.step()
        yield metrics
