"""``PPO``: rollout-plus-update as a LightningModule."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from gymnasium import Space
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves
from torchmetrics import CatMetric, MeanMetric
from typing_extensions import override

from puffer_lightning.distributed import (
    check_same_options,
    derive_seed,
    finish_reduction,
    no_sync,
    share_seed,
    world_size,
)
from puffer_lightning.engines.bad_batches import keeping_bad_batch
from puffer_lightning.engines.checkpoints import check_same_policy
from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.elastic import ENTRY
from puffer_lightning.engines.optimizers import (
    LRScaling,
    Schedule,
    apply_options,
    check_scaling,
    check_schedule,
    make_optimizer,
    make_scheduler,
    options_of,
)
from puffer_lightning.engines.precision import autocast_dtype
from puffer_lightning.engines.profiling import NoProfiler, measure_with
from puffer_lightning.engines.reports import outlast_full_disks, report
from puffer_lightning.engines.resume import leave, take_up
from puffer_lightning.engines.steps import backward_and_optimizer
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import (
    Policy,
    RewardNormalizer,
    make_normalizer,
    make_policies,
    make_policy,
)
from puffer_lightning.ppo import Learner, PPOConfig
from puffer_lightning.rollout import Episodes, Rollout


class PPO(L.LightningModule):
    """Proximal policy optimization; one Lightning epoch is one rollout and the update on it.

    Source: Schulman et al. 2017, arXiv 1707.06347.

    Args:
        policy: Actor-critic network, a ``puffer_lightning.policies.Policy`` by ``class_path``; chosen from
            the environment's spaces if not given. Where each type of agent has its own, it says how to make
            one.
        optimizer: Any torch optimizer by ``class_path``.
        lr_schedule: How the learning rate falls to 0 over ``total_timesteps`` ("linear" or "cosine"), or
            "constant", or any torch scheduler by ``class_path``, which takes one step an iteration. A run
            resumed with one of the three follows the options it is given now, one with a torch scheduler
            those of the checkpoint.
        warm_up_share: Share of ``total_timesteps`` over which the learning rate rises to its full value; not
            with a torch scheduler.
        lr_scaling: Multiply the learning rate by the number of ranks ("linear") or its square root ("sqrt"),
            for minibatches that grow with it, or leave it as it is ("none"). Where that is too much for a new
            policy, ``warm_up_share`` helps.
        sync_check_every: Check after every so many iterations that all ranks hold the same policy, bit for
            bit; 0 for never.
        compile: Compile acting and the update with ``torch.compile``: on one device each minibatch, Adam's
            step included, is one graph; elsewhere the loss is. The first run takes half a minute for that,
            later ones some seconds. Where there is no compiler, a warning says so.
        normalize_observations: Shift and scale each element of the observations by running statistics, to
            mean 0 and standard deviation 1, clipped to ±10: all Box parts but those of uint8. The statistics
            are saved with the policy, and evaluation uses them as they are.
        normalize_rewards: Divide the rewards trained on by the running standard deviation of discounted
            returns; the episode returns that are logged stay as the environment gave them.
        coefficients: Fields of :class:`~puffer_lightning.ppo.PPOConfig`.

    Attributes:
        config: The coefficients; changes take effect at the next iteration.
        learner: The run's counters and statistics, once training is set up.
        trained_by_fabric: What Fabric has wrapped, by name, while :func:`iterations` trains.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    policy: Policy
    learner: Learner
    trained_by_fabric: dict[str, Any]

    def __init__(
        self,
        policy: Callable[[Space[Any], Space[Any]], Policy] | None = None,
        optimizer: OptimizerCallable = lambda params: Adam(params, lr=2.5e-3, eps=1e-5, fused=True),
        lr_schedule: Schedule = "linear",
        warm_up_share: float = 0.0,
        lr_scaling: LRScaling = "none",
        sync_check_every: int = 0,
        compile: bool = False,
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
        **coefficients: Any,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = PPOConfig(**coefficients)
        self.config.check()
        check_schedule(lr_schedule, warm_up_share)
        check_scaling(lr_scaling)
        if sync_check_every < 0:
            raise ConfigurationError(f"sync_check_every is {sync_check_every}: set it to 0 or more.")
        self._make_policy = policy or make_policy
        self._make_optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._warm_up_share = warm_up_share
        self._lr_scaling = lr_scaling
        self._sync_check_every = sync_check_every
        self._compile = compile
        self._normalize_observations = normalize_observations
        self._normalize_rewards = normalize_rewards
        self._saved: dict[str, Any] | None = None
        self._returns, self._lengths = CatMetric(), CatMetric()
        self._returns_of: dict[str, MeanMetric] = {}

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            # So Lightning notes which hook runs, thirty times an iteration; it is no parameter, which takes
            # nn.Module longer to find out than the hook takes.
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # Shared with Fabric, in the order in which an engine calls them.

    def build(self, data: RolloutDataModule) -> None:
        """Make the policy for the environments' spaces, unless there is one.

        Its initialisation depends on the run's seed alone, whatever random numbers were drawn before. The
        seed is rank 0's; ranks whose options differ are refused before they can wait for one another.

        Raises:
            ConfigurationError: The coefficients do not fit the rollout, the policy the spaces, or this rank's
                options the others'.
        """
        share_seed()
        check_same_options({"model": vars(self.config), "data": data.sizes})
        self.config.check_sizes(data.horizon, data.num_envs)
        if not hasattr(self, "policy"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(torch.initial_seed(), "policy"))
                self.policy = make_policies(self._make_policy, *data.spaces)
            if self._normalize_observations:
                self.policy.observation_normalizer = make_normalizer(data.spaces[0])
            if self._normalize_rewards:
                self.policy.reward_normalizer = RewardNormalizer()
        if tree_leaves(self.policy.initial_state(1)):
            self.config.check_sizes(data.horizon, data.num_envs, sequences=True)

    def make_optimizer(self, data: RolloutDataModule) -> tuple[Optimizer, LRScheduler]:
        """The optimizer and the scheduler, which takes one step an iteration.

        Raises:
            ConfigurationError: One of them cannot be made, or would need more than PPO gives it.
        """
        optimizer = make_optimizer(
            self._make_optimizer, self.policy.parameters(), self._lr_scaling, data.ranks_of_batch
        )
        if world_size() > 1:
            rank_zero_info(self._describe_batch(data, optimizer.param_groups[0]["lr"]))

        def progress() -> float:
            return self.env_steps / data.total_timesteps

        scheduler = make_scheduler(self._lr_schedule, self._warm_up_share, optimizer, progress)
        self._options = options_of(optimizer)
        return optimizer, scheduler

    def start(self) -> Learner:
        """Make the learner, once the policy is on its device."""
        self.learner = Learner(
            self.policy, self.config, torch.initial_seed(), self._compile, self._sync_check_every
        )
        return self.learner

    def resume(
        self, saved: dict[str, Any], data: RolloutDataModule, optimizer: Optimizer, scheduler: LRScheduler
    ) -> None:
        """Go on from what another run left, in place of ``start``.

        Args:
            saved: What it left, see :func:`~puffer_lightning.engines.resume.leave`.
            data: The environments.
            optimizer: With its state of that run. If the schedule has a name, its options win.
            scheduler: Likewise.
        """
        take_up(saved, self.start, data)
        if isinstance(self._lr_schedule, str):
            assert isinstance(scheduler, LambdaLR)
            apply_options(optimizer, scheduler, self._options)

    def _describe_batch(self, data: RolloutDataModule, learning_rate: float) -> str:
        ranks, parts = world_size(), self.config.accumulate_grad_batches
        minibatch = data.horizon * data.num_envs // self.config.num_minibatches
        return (
            f"{ranks} ranks × {data.num_envs} environments × {data.horizon} steps: "
            f"{data.steps_per_rollout:,} steps a rollout, {self.config.num_minibatches} minibatches of "
            f"{ranks * minibatch:,} (ranks × microbatches × size: "
            f"{ranks} × {parts} × {minibatch // parts:,}), learning rate {learning_rate:g}."
        )

    # Lightning's hooks, in the order in which it calls them.

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        # The first hook of all, before Lightning refuses these settings in words that do not name ours.
        _ = self._data
        if self.trainer.gradient_clip_val is not None:
            raise ConfigurationError(
                "PPO clips gradients itself: instead of trainer.gradient_clip_val set model.max_grad_norm "
                f"{self.trainer.gradient_clip_val}."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                "PPO accumulates gradients itself: instead of trainer.accumulate_grad_batches set "
                f"model.accumulate_grad_batches {self.trainer.accumulate_grad_batches}."
            )
        return []

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            if type(self.trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
                self.trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
            # Not what an earlier validation loaded, nor an earlier run: a Trainer that has trained already
            # and may now train longer goes on, a new one starts to count.
            self._saved = None
            if not self.trainer.current_epoch and hasattr(self, "learner"):
                del self.learner
            self._max_epochs = self.trainer.max_epochs
            if (limit := self._limit_iterations()) is not None:
                rank_zero_info(
                    f"trainer.max_epochs ends the run after {limit} iterations: "
                    f"{limit * self._data.steps_per_rollout} of {self._data.total_timesteps} environment "
                    "steps; set it to -1 for all of them."
                )

    @override
    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.trainer.fit_loop.max_epochs = self._max_epochs

    def _limit_iterations(self, done: int = 0) -> int | None:
        """Let the Trainer make all iterations after the ``done`` ones; returns its limit if that is less."""
        wanted, limit = done + self._data.iterations_after(self.env_steps if done else 0), self._max_epochs
        self._limited = limit is not None and 0 <= limit < wanted
        self.trainer.fit_loop.max_epochs = limit if self._limited else wanted
        return limit if self._limited else None

    @override
    def configure_model(self) -> None:
        self.build(self._data)
        self.policy.autocast = autocast_dtype(self.trainer.precision)

    @override
    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.make_optimizer(self._data)
        return [optimizer], [scheduler]

    @override
    def on_train_start(self) -> None:
        if self._saved is not None:
            scheduler = self.lr_schedulers()
            assert isinstance(scheduler, LRScheduler)
            self.resume(self._saved, self._data, self.trainer.optimizers[0], scheduler)
            self._saved = None
        elif not hasattr(self, "learner"):
            self.start()
        self._backward, self._optimizer = backward_and_optimizer(self)
        for logger in self.trainer.loggers:
            if self.trainer.is_global_zero and isinstance(logger, CSVLogger):
                outlast_full_disks(logger)
        self._measure = measure_with(self.trainer)
        self._callback_metrics = self.trainer.callback_metrics

    @override
    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        """Run the whole update on a rollout, under manual optimization."""
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LRScheduler)
        assert self.trainer.strategy.model is not None
        # The policy autocasts, and nothing else; the Trainer would, backward passes included.
        with torch.autocast(self.device.type, enabled=False), keeping_bad_batch(self.trainer):
            metrics = self._measure("update", self.learner.learn)(
                rollout,
                self._optimizer,
                backward=self._backward,
                no_sync=partial(no_sync, self.trainer.strategy.model),
                finish=partial(finish_reduction, self.trainer.strategy.model),
                measure=self._measure,
            )
        scheduler.step()
        if not self._limited:
            # Preempted rollouts, and those before a resumption on another number of ranks, have other sizes.
            left = self._data.iterations_after(self.env_steps)
            self.trainer.fit_loop.max_epochs = self.trainer.current_epoch + 1 + left
        report(self.trainer, self._callback_metrics, metrics, self.env_steps)
        # Lightning adds the batch that this was.
        self._set_logging_step(self.env_steps - 1)

    # Lightning looks at it in each iteration, and would work it out anew.
    training_step.__signature__ = inspect.signature(training_step)  # type: ignore[attr-defined]

    def _set_logging_step(self, step: int) -> None:
        # The x-axis of all that Lightning, its callbacks and self.log write: its own would be iterations.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = step

    @override
    def validation_step(self, episodes: Episodes, batch_idx: int) -> None:
        """Count the episodes that this rank played."""
        self._returns.update(torch.from_numpy(episodes.returns))
        self._lengths.update(torch.from_numpy(episodes.lengths))
        types = sorted(set(episodes.agent_types))
        if len(types) > 1:
            of = np.resize(episodes.agent_types, len(episodes.returns))
            for name in types:
                mean = self._returns_of.setdefault(name, MeanMetric())
                mean.update(torch.from_numpy(episodes.returns[of == name]))

    @override
    def test_step(self, episodes: Episodes, batch_idx: int) -> None:
        """As ``validation_step``."""
        self.validation_step(episodes, batch_idx)

    @override
    def predict_step(self, episodes: Episodes, batch_idx: int) -> Episodes:
        """The episodes as they were played."""
        return episodes

    @override
    def on_validation_epoch_end(self) -> None:
        self._report("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, stage: str) -> None:
        metrics = {}
        for name, gathered in (("return", self._returns), ("length", self._lengths)):
            values = torch.as_tensor(gathered.compute(), dtype=torch.float64)
            metrics[f"{stage}/episode_{name}"] = values.mean().item()
            metrics[f"{stage}/episode_{name}_std"] = values.std(correction=0).item()
            gathered.reset()
        for name, mean in self._returns_of.items():
            if mean.compute().isfinite():  # none of this type was played if it is not
                metrics[f"{stage}/episode_return/{name}"] = mean.compute().item()
            mean.reset()
        self._set_logging_step(self.env_steps)
        with warnings.catch_warnings():
            # Only what is logged is returned by the Trainer, so it is even where there is no logger.
            warnings.filterwarnings("ignore", message=".*no logger configured")
            self.log_dict(metrics, sync_dist=True)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if hasattr(self, "learner"):
            checkpoint[ENTRY] = leave(self.learner, self._data)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "ranks" not in checkpoint.get(ENTRY, {}):
            raise ConfigurationError(
                "ckpt_path names a checkpoint that PPO did not write: choose one of this version of it."
            )
        if not hasattr(self, "policy"):
            raise ConfigurationError(
                "The policy's shape depends on the environment: call model.build(data) before loading a "
                "checkpoint, or give ckpt_path to the Trainer."
            )
        # A strategy that shards the policy has loaded the weights itself.
        if "state_dict" in checkpoint:
            check_same_policy(self.policy, checkpoint["state_dict"])
        self._saved = checkpoint[ENTRY]
        if self._trainer is not None and self.trainer.state.fn is TrainerFn.FITTING:
            self._data.keep_batch(self._saved["sizes"], self.config)
            made = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
            # Lightning counts one that was interrupted, too; after the next one the limit is as it should be.
            self._limit_iterations(made + 1 if self._data.iterations_after(self.env_steps) else made)

    @property
    def env_steps(self) -> int:
        """Environment steps, over all ranks, that the policy was trained on: the x-axis of all metrics."""
        if self._saved is not None:
            return int(self._saved["env_steps"])
        return self.learner.env_steps if hasattr(self, "learner") else 0

    @property
    def _data(self) -> RolloutDataModule:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, RolloutDataModule):
            raise ConfigurationError(
                "PPO collects its own data: give the Trainer datamodule=RolloutDataModule(...)."
            )
        return data
