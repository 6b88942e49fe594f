"""The same loop as the Trainer's, as a generator that a notebook or script steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.fabric import Fabric
from torch.optim import Optimizer

from puffer_lightning.distributed import finish_reduction, no_sync
from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.elastic import ENTRY, read_sizes
from puffer_lightning.engines.module import PPO
from puffer_lightning.engines.precision import autocast_dtype
from puffer_lightning.engines.resume import leave
from puffer_lightning.engines.steps import fabric_backward
from puffer_lightning.policies import Policy
from puffer_lightning.ppo import Metrics


def iterations(
    fabric: Fabric, model: PPO, data: RolloutDataModule, ckpt_path: str | Path | None = None
) -> Iterator[Metrics]:
    """Train, one iteration (a rollout and the update on it) for each ``next``.

    Between two iterations anything may be looked at or changed: ``model.config.ent_coef = 0.0`` counts from
    the next one on, ``data.evaluate(model.policy)`` plays episodes. With the same seed
    (``fabric.seed_everything``) the numbers are those of the Trainer, bit for bit.

    Args:
        fabric: Launched already, if it has several processes.
        model: The coefficients, policy and optimizer.
        data: The environments. They stay open; ``data.close()`` closes them.
        ckpt_path: What :func:`save_checkpoint` wrote, to go on from, as if the run had never stopped.

    Yields:
        The iteration's metrics, see :meth:`~puffer_lightning.ppo.Learner.learn`.

    Raises:
        ConfigurationError: The coefficients do not fit the rollout, or the policy the spaces.
    """
    data.keep_batch(read_sizes(ckpt_path), model.config)
    model.build(data)
    model.policy.autocast = autocast_dtype(fabric.strategy.precision.precision)
    model.policy.to(fabric.device)
    model.start()
    # One after the other: an optimizer needs the parameters that the strategy leaves.
    policy = fabric.setup_module(model.policy)
    policy.mark_forward_method("evaluate")
    optimizer, scheduler = model.make_optimizer(data)
    fabric_optimizer = cast(Optimizer, fabric.setup_optimizers(optimizer))
    model.trained_by_fabric = {"policy": policy, "optimizer": fabric_optimizer, "scheduler": scheduler}
    if ckpt_path is not None:
        state: dict[str, Any] = {**model.trained_by_fabric, ENTRY: {}}
        fabric.load(ckpt_path, state, weights_only=True)
        model.resume(state[ENTRY], data, optimizer, scheduler)
    learner = model.learner
    while learner.env_steps < data.total_timesteps:
        metrics = learner.learn(
            data.collect(model.policy, learner.act),
            fabric_optimizer,
            backward=fabric_backward(fabric),
            # Not policy.module, which is the policy under the strategy's wrapper.
            no_sync=partial(no_sync, policy._forward_module),
            finish=partial(finish_reduction, policy._forward_module),
            policy=cast(Policy, policy),
        )
        scheduler.step()
        yield metrics


def save_checkpoint(fabric: Fabric, path: str | Path, model: PPO, data: RolloutDataModule) -> None:
    """Write all that ``iterations(…, ckpt_path=path)`` goes on from; between two iterations, on all ranks.

    Args:
        fabric: As of ``iterations``.
        path: The file, or the folder where the strategy shards the policy.
        model: As of ``iterations``, which has begun.
        data: Likewise; its environments are still open.
    """
    fabric.save(path, {**model.trained_by_fabric, ENTRY: leave(model.learner, data)})
