"""``RolloutDataModule``: the environments, as a LightningDataModule."""

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, get_args

import lightning as L
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv
from typing_extensions import override

from puffer_lightning.distributed import Preemption, derive_seed, rank, shares_data, world_size
from puffer_lightning.engines.elastic import kept_envs
from puffer_lightning.engines.profiling import measure_with
from puffer_lightning.envs import EnvSource, EnvWrapper, WorkerOptions, check_env, make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy
from puffer_lightning.ppo import PPOConfig
from puffer_lightning.rollout import (
    Actor,
    Collector,
    Episodes,
    Measure,
    Overlap,
    OverlappedCollector,
    Rollout,
    check_overlap,
    play,
    unmeasured,
)

# More environments than this would step mostly finished ones while the last episodes end.
_MAX_EVAL_ENVS = 128


class RolloutDataModule(L.LightningDataModule):
    """Owns the environments and gives Lightning one rollout an epoch.

    Args:
        env: Gymnasium id of the environment (``CartPole-v1``, or ``module:Name-v0`` to import a module
            first), or a class or function that takes the number of environments as its first argument and
            makes a ``gymnasium.vector.VectorEnv``: itself or by its dotted path (``my_module.make``); on the
            command line and in YAML also as ``class_path`` and ``init_args``.
        env_kwargs: Further arguments of the environment, or of the class or function that makes it.
        num_envs: Environments that step together, on each rank.
        split_envs: Divide ``num_envs`` among the ranks instead, so that the rollouts of all of them together
            have as many environments on any number of ranks.
        horizon: Steps of each environment in a rollout.
        total_timesteps: Environment steps of the whole training run, over all ranks.
        eval_episodes: Episodes that ``validate``, ``test`` and ``predict`` play, over all ranks.
        eval_greedy: Evaluate the most probable actions rather than sampled ones.
        num_workers: Processes on each rank that step environments which gymnasium has not vectorised; 0 steps
            them in this process.
        worker_options: Of these processes: ``on_fault: restart`` goes on with new environments where one
            raises, hangs for ``step_timeout`` seconds or loses its process, ``on_non_finite: mask`` leaves
            NaN and infinity out of training, each at most ``max_faults`` times together; ``context`` is how
            processes start. See ``puffer_lightning.envs.SharedMemoryVectorEnv``.
        overlap: Step half of the environments while the policy acts on the other half, instead of all and
            then all: ``halves`` are the same ones at each step, so that a run can be repeated bit for bit;
            ``first_ready`` are those that have stepped first, for steps that take now long, now short. Needs
            ``num_workers``, or environments with ``send`` and ``recv``.
        wrappers: Wrappers of a single environment, such as those of ``gymnasium.wrappers``, the first one
            innermost: functions of an environment, on the command line and in YAML by ``class_path`` and
            ``init_args``. A vectorised implementation of the environment is then not used.
        preempt_at: Share of the ranks that end the rollouts of the others when they have finished theirs, for
            environments that are much slower on some ranks than on others; no rank is cut short of a quarter
            of its ``horizon``. Not given, all ranks wait for the slowest.

    Raises:
        ConfigurationError: An option is out of its range, or no such environment is registered.
    """

    def __init__(
        self,
        env: EnvSource = "CartPole-v1",
        env_kwargs: dict[str, Any] | None = None,
        num_envs: int = 64,
        split_envs: bool = False,
        horizon: int = 32,
        total_timesteps: int = 200_000,
        eval_episodes: int = 100,
        eval_greedy: bool = True,
        num_workers: int = 0,
        worker_options: WorkerOptions | None = None,
        overlap: Overlap | None = None,
        wrappers: list[EnvWrapper] | None = None,
        preempt_at: float | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, object] = {
            "num_envs": num_envs,
            "horizon": horizon,
            "total_timesteps": total_timesteps,
            "eval_episodes": eval_episodes,
            "num_workers": num_workers,
        }
        for name, size in sizes.items():
            least = 0 if name == "num_workers" else 1
            if not isinstance(size, Integral) or size < least:
                raise ConfigurationError(f"{name} is {size}: set it to a whole number, {least} or more.")
        if preempt_at is not None and not 0 < preempt_at < 1:
            raise ConfigurationError(
                f"preempt_at is {preempt_at}: set it between 0 and 1, such as 0.6, or to null for never."
            )
        if preempt_at is not None and overlap:
            raise ConfigurationError(f"preempt_at does not go with overlap {overlap}: leave one of them out.")
        check_env(env)
        _check_workers(num_envs, num_workers, worker_options, overlap)
        self.env = env
        self.env_kwargs = env_kwargs
        self.horizon = horizon
        self.total_timesteps = total_timesteps
        self.eval_episodes = eval_episodes
        self.eval_greedy = eval_greedy
        self.num_workers = num_workers
        self.worker_options = worker_options
        self.overlap = overlap
        self.wrappers = wrappers or []
        self.preempt_at = preempt_at
        self._num_envs = num_envs
        self._split_envs = split_envs
        self._envs: dict[str, VectorEnv[Any, Any, Any]] = {}
        self._collector: Collector | None = None
        self._total_envs: int | None = None
        self._left: dict[str, Any] = {"lost": "none had begun"}

    @property
    def num_envs(self) -> int:
        """Environments of this rank."""
        return self.envs_of_each(world_size())

    def envs_of_each(self, ranks: int) -> int:
        """Environments of one of ``ranks`` ranks.

        Raises:
            ConfigurationError: They are to be split and cannot be divided evenly.
        """
        if self._total_envs is not None:
            return self._total_envs // ranks
        if not self._split_envs:
            return self._num_envs
        if self._num_envs % ranks:
            raise ConfigurationError(
                f"num_envs {self._num_envs} cannot be split among {ranks} ranks: set it to a multiple of "
                f"{ranks}."
            )
        return self._num_envs // ranks

    @property
    def ranks_of_batch(self) -> int:
        """The number of ranks that the sizes are of: that of the first run, if one is resumed."""
        if self._total_envs is None or self._split_envs:
            return world_size()
        return self._total_envs // self._num_envs

    @property
    def sizes(self) -> dict[str, Any]:
        """The options that all ranks have to agree on if none is to wait for another, by name."""
        return {
            name: getattr(self, name)
            for name in ("num_envs", "horizon", "total_timesteps", "eval_episodes", "preempt_at")
        }

    @property
    def steps_per_rollout(self) -> int:
        """Environment steps of one iteration, over all ranks."""
        return self.horizon * self.num_envs * world_size()

    @property
    def num_iterations(self) -> int:
        """Iterations that reach ``total_timesteps``."""
        return self.iterations_after(0)

    def iterations_after(self, env_steps: int) -> int:
        """Iterations still to make after ``env_steps`` environment steps of all ranks."""
        return max(0, -(-(self.total_timesteps - env_steps) // self.steps_per_rollout))

    @property
    def eval_share(self) -> int:
        """Evaluation episodes that this rank plays."""
        return (self.eval_episodes - rank() + world_size() - 1) // world_size()

    @property
    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Observation and action space of one environment."""
        env = self.training_env if "train" in self._envs else self.evaluation_env
        return env.single_observation_space, env.single_action_space

    @property
    def training_env(self) -> VectorEnv[Any, Any, Any]:
        """The environments of the rollouts, made when first asked for.

        Raises:
            ConfigurationError: They cannot be made or stepped as asked for, or are not as many.
        """
        if shares_data() and (self.overlap == "first_ready" or self.preempt_at is not None):
            name, instead = ("overlap", "halves or null") if self.overlap else ("preempt_at", "null")
            raise ConfigurationError(
                f"{name} {self.overlap or self.preempt_at} does not go with tensor_parallel_size above 1, "
                f"whose ranks act on the same environments in the same order: set {name} to {instead}."
            )
        env = self._environment("train", self.num_envs, self.num_envs // 2 if self.overlap else None)
        if env.num_envs != self.num_envs:
            raise ConfigurationError(
                f"env made {env.num_envs} environments when told to make num_envs {self.num_envs}: set "
                f"num_envs to {env.num_envs}, or let it make as many as its first argument says."
            )
        if self.overlap:
            check_overlap(env, self.overlap)
        return env

    @property
    def evaluation_env(self) -> VectorEnv[Any, Any, Any]:
        """The environments of the evaluation, made when first asked for."""
        return self._environment("eval", max(1, min(self.eval_share, _MAX_EVAL_ENVS)))

    def _environment(
        self, name: str, num_envs: int, batch_size: int | None = None
    ) -> VectorEnv[Any, Any, Any]:
        if name not in self._envs:
            self._envs[name] = make_vector_env(
                self.env,
                num_envs,
                self.env_kwargs,
                num_workers=self.num_workers,
                worker_options=self.worker_options,
                batch_size=batch_size,
                wrappers=self.wrappers,
            )
        return self._envs[name]

    def keep_batch(self, saved: dict[str, Any] | None, config: PPOConfig, ranks: int | None = None) -> None:
        """Let the environments be as many as those of the run that is resumed, on all ranks together.

        Args:
            saved: The sizes of its rollouts, if one is resumed.
            config: Divides rollouts into minibatches.
            ranks: The number of ranks, if they have not come together yet.

        Raises:
            ConfigurationError: They cannot be divided among the ranks.
        """
        self._total_envs = kept_envs(saved, config, self._batch, ranks or world_size())
        if "train" in self._envs and self._envs["train"].num_envs != self.num_envs:
            self._envs.pop("train").close()

    @property
    def _batch(self) -> dict[str, Any]:
        return {"num_envs": self._num_envs, "split_envs": self._split_envs, "horizon": self.horizon}

    def leave(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where the rollouts stand, see ``Collector.state_dict``, and the options that give their size."""
        return self._left if self._collector is None else self._collector.state_dict(), self._batch

    def take_up(self, left: dict[str, Any], env_steps: int, device: torch.device) -> str | None:
        """Go on where the rollouts of another run stood.

        Args:
            left: See ``Collector.state_dict``.
            env_steps: Steps of that run. New episodes are not those with which it began.
            device: Where the policy is.

        Returns:
            Why its episodes do not go on, if so.
        """
        seed = derive_seed(torch.initial_seed(), f"resumed after {env_steps} steps")
        self._collector = self._make_collector(seed, device)
        return self._collector.load_state_dict(left)

    @override
    def setup(self, stage: str) -> None:
        """Make the environments of this rank, so that their spaces are known before the policy is built."""
        if stage == "fit":
            self._left = {"lost": "none had begun"}
        _ = self.training_env if stage == "fit" else self.evaluation_env

    @override
    def teardown(self, stage: str) -> None:
        """Close the environments; what they leave is still saved."""
        self._left = self.leave()[0]
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Close the environments, after Ctrl-C too: Lightning then skips ``teardown``."""
        self.close()

    def close(self) -> None:
        """Close the environments; the next use makes new ones."""
        while self._envs:
            self._envs.popitem()[1].close()
        self._collector = None

    def collect(self, policy: Policy, act: Actor | None = None, measure: Measure = unmeasured) -> Rollout:
        """The next rollout of the training environments, see :meth:`Collector.collect`."""
        if self._collector is None:
            self._collector = self._make_collector(torch.initial_seed(), policy.device)
        with policy.acting(uneven=self.overlap is not None or self.preempt_at is not None):
            return measure("rollout", self._collector.collect)(policy, act, measure)

    def _make_collector(self, seed: int, device: torch.device) -> Collector:
        preemption = None
        if self.preempt_at is not None and world_size() > 1:
            preemption = Preemption(self.preempt_at)
        if self.overlap:
            return OverlappedCollector(self.training_env, self.horizon, seed, device, self.overlap)
        return Collector(self.training_env, self.horizon, seed, device, preemption)

    def evaluate(self, policy: Policy, record: bool = False) -> Episodes:
        """Play this rank's share of the evaluation episodes; the same ones at each call.

        Args:
            policy: The policy.
            record: Keep observations, actions and rewards.
        """
        seed = derive_seed(torch.initial_seed(), "evaluation", rank())
        env, episodes = self.evaluation_env, self.eval_share
        with policy.acting(uneven=True):
            return play(policy, env, episodes, seed=seed, greedy=self.eval_greedy, record=record)

    @override
    def train_dataloader(self) -> "_Once":
        assert self.trainer is not None
        measure = measure_with(self.trainer)
        return _Once(lambda: _Sealed(self.collect(self._module.policy, self._module.learner.act, measure)))

    @override
    def val_dataloader(self) -> "_Once":
        return _Once(lambda: self.evaluate(self._module.policy))

    @override
    def test_dataloader(self) -> "_Once":
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> "_Once":
        return _Once(lambda: self.evaluate(self._module.policy, record=True))

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.rollout.to(device) if isinstance(batch, _Sealed) else batch

    @property
    def _module(self) -> Any:
        assert self.trainer is not None
        return self.trainer.lightning_module


def _check_workers(
    num_envs: int, num_workers: int, worker_options: WorkerOptions | None, overlap: Overlap | None
) -> None:
    if worker_options and not num_workers:
        raise ConfigurationError("worker_options are for worker processes: set num_workers to 1 or more.")
    unknown = set(worker_options or {}) - WorkerOptions.__annotations__.keys()
    if unknown:
        raise ConfigurationError(
            f"worker_options has no {min(unknown)}: choose from {', '.join(WorkerOptions.__annotations__)}."
        )
    if overlap not in (None, *get_args(Overlap)):
        raise ConfigurationError(f"overlap is {overlap!r}: set it to halves or first_ready, or leave it out.")
    if overlap and num_envs % 2:
        raise ConfigurationError(f"num_envs is {num_envs} with overlap {overlap}: set it to an even number.")
    workers = min(num_workers, num_envs)
    if overlap and workers and (workers % 2 or num_envs % workers):
        raise ConfigurationError(
            f"num_workers is {num_workers} with overlap {overlap}: set it to an even number that divides "
            f"num_envs {num_envs}, so that each half of the environments has its own."
        )


class _Sealed:
    """A rollout that Lightning's precision plug-ins leave alone; those of half precision would round it."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout


class _Once:
    """A loader of exactly one batch, made when it is asked for.

    Lightning calls ``__iter__`` twice at the start and prefetches from a loader whose length it does not
    know; a rollout collected then would be one of an old policy.
    """

    def __init__(self, make: Callable[[], _Sealed | Episodes]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[_Sealed | Episodes]:
        yield self._make()
