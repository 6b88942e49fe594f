"""The state of a PPO run that outlives an iteration, whichever engine drives it."""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from puffer_lightning.distributed import (
    check_same_tensors,
    derive_seed,
    gather_rows,
    rank,
    set_generator,
    world_size,
)
from puffer_lightning.functional import running_returns, straggler_metrics
from puffer_lightning.memory import keep_freed_memory
from puffer_lightning.policies import Policy
from puffer_lightning.ppo.compiled import CompiledAct, CompiledMinibatches
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.gradients import Finish
from puffer_lightning.ppo.loss import minibatch_loss
from puffer_lightning.ppo.sentinel import Sentinel
from puffer_lightning.ppo.update import update
from puffer_lightning.rollout import Actor, EpisodeStatistics, Measure, Rollout, episode_means, unmeasured

Metrics = dict[str, float]


class Learner:
    """Trains a policy rollout by rollout, counts environment steps and measures.

    Args:
        policy: The policy, on the device where it will be trained.
        config: The coefficients; the same object is read at every iteration.
        seed: The run's seed; minibatches are shuffled by it, differently on each rank.
        compile: Compile acting and the loss.
        sync_check_every: Check that the ranks agree after every so many iterations; 0 for never.

    Attributes:
        act: The policy's ``act``, compiled if asked for; what a collector should call.
        env_steps: Environment steps trained on so far, over all ranks.
        rank_seconds: Of the last iteration, for each rank the seconds of its rollout and of its update, which
            includes waiting for slower ranks.
        stop_signal: The number of the signal that has asked this rank to end, 0 for none; may be set at any
            time.
        agreed_signal: The highest ``stop_signal`` of all ranks as of the last iteration, the same on each.
    """

    def __init__(
        self, policy: Policy, config: PPOConfig, seed: int, compile: bool = False, sync_check_every: int = 0
    ) -> None:
        keep_freed_memory()
        self.policy = policy
        self.config = config
        self.env_steps = 0
        self._sync_check_every = sync_check_every
        self._iterations = 0
        self.rank_seconds: list[list[float]] = []
        self.stop_signal = self.agreed_signal = 0
        self.act: Actor = CompiledAct(policy) if compile else policy.act
        self._compiled = CompiledMinibatches(policy) if compile else None
        self._loss = torch.compile(minibatch_loss) if compile else minibatch_loss
        device = policy.device
        self._generator = torch.Generator(device).manual_seed(derive_seed(seed, "minibatches", rank()))
        self._sentinel = Sentinel()
        self._statistics = EpisodeStatistics()
        self._statistics_of: dict[str, EpisodeStatistics] = {}
        # Of the episodes under way.
        self._discounted: Tensor | None = None

    def learn(
        self,
        rollout: Rollout,
        optimizer: Optimizer,
        *,
        backward: Callable[[Tensor], object] | None = None,
        no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
        finish: Finish | None = None,
        policy: Policy | None = None,
        measure: Measure = unmeasured,
    ) -> Metrics:
        """Train on a rollout.

        Args:
            rollout: What the policy collected.
            optimizer: Steps the policy's parameters.
            backward: See :func:`~puffer_lightning.ppo.update`; None if nobody but the optimizer needs to know
                of a backward pass.
            no_sync: Likewise.
            finish: Likewise.
            policy: The policy as the engine wrapped it, if it did.
            measure: See :func:`~puffer_lightning.ppo.update`.

        Returns:
            The iteration's metrics by their logged names, over all ranks: ``rollout/…`` of the last episodes,
            without mean return and length before the first has ended, and of each type of agent where there
            are several; ``train/…``; ``time/…``, where ``sps`` is environment steps per second and shares are
            of the time from the rollout's first step to the update's last; and, with several ranks,
            ``ranks/…``, see :func:`~puffer_lightning.functional.straggler_metrics`.

        Raises:
            NonFiniteError: Too many updates in a row were not wholly finite.
            RuntimeError: The ranks' policies have drifted apart.
        """
        begin = time.perf_counter()
        self._iterations += 1
        parts, scaled = self.config.accumulate_grad_batches, self._scaled(rollout)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        losses = update(
            policy or self.policy,
            optimizer,
            scaled,
            self.config,
            self._generator,
            backward=backward or torch.Tensor.backward,
            no_sync=no_sync,
            finish=finish,
            loss_function=minibatch_loss if backward is None or tree_leaves(rollout.state) else self._loss,
            compiled=self._compiled if backward is None else None,
            measure=measure,
        )
        if self.policy.observation_normalizer is not None:
            # Only now: the update has to see the observations as the rollout's policy saw them.
            self.policy.observation_normalizer.update(rollout.observations, rollout.valid)
        if self._sync_check_every and self._iterations % self._sync_check_every == 0:
            check_same_tensors(self.policy.state_dict())
        counted = self._count_episodes(rollout)
        seconds = rollout.seconds, time.perf_counter() - begin
        facts = rollout.num_steps, *seconds, self.config.accumulate_grad_batches, self.stop_signal
        # All that ranks tell one another besides losses and gradients, in one go.
        row = torch.cat([*(of.sums() for of in counted.values()), torch.tensor(facts, dtype=torch.float64)])
        rows = gather_rows(row.to(rollout.rewards.device)).cpu()
        of_episodes, of_ranks = rows.tensor_split([-len(facts)], dim=1)
        sums = of_episodes.sum(0).reshape(len(counted), -1)
        made, *_, most_parts, signals = of_ranks.unbind(1)
        steps = int(made.sum())
        self.env_steps += steps
        means = {kind: episode_means(of) for kind, of in zip(counted, sums, strict=True)}
        named = {f"rollout/{name}": value for name, value in means.pop("").items()}
        named |= {f"rollout/episode_return/{kind}": of["episode_return"] for kind, of in means.items()}
        named |= {f"train/{name}": value for name, value in losses.items()}
        metrics = _read(named)
        metrics["train/learning_rate"] = learning_rate
        self.rank_seconds = of_ranks[:, 1:3].tolist()
        self.agreed_signal = int(signals.max())
        end = time.perf_counter()
        if world_size() > 1:
            metrics |= {f"ranks/{k}": value for k, value in straggler_metrics(self.rank_seconds).items()}
        metrics["time/sps"] = steps / (end - rollout.began)
        metrics["time/rollout_share"] = rollout.seconds / (end - rollout.began)
        metrics["time/update_share"] = (end - begin) / (end - rollout.began)
        self._accumulate(parts, int(most_parts.max()))
        self._sentinel.check(int(metrics["train/skipped"]), self.policy, rollout, scaled, self.config)
        return metrics

    def _accumulate(self, before: int, parts: int) -> None:
        """Split minibatches as the rank with the least memory has to, from the next one on."""
        self.config.accumulate_grad_batches = parts
        if parts > before and rank() == 0:
            warnings.warn(
                f"Out of memory: from now on each minibatch is trained on in {parts} microbatches instead of "
                f"{before}, with the same gradients; model.accumulate_grad_batches {parts} does so at once.",
                stacklevel=2,
            )

    def _count_episodes(self, rollout: Rollout) -> dict[str, EpisodeStatistics]:
        """The statistics of all episodes, under "", and of each type of agent, if there are several."""
        self._statistics.update(rollout.episode_returns, rollout.episode_lengths)
        counted = {"": self._statistics}
        types = sorted(set(rollout.agent_types))
        if len(types) > 1:
            places = rollout.episode_rows % len(rollout.agent_types)
            for name in types:
                own = torch.tensor([kind == name for kind in rollout.agent_types], device=places.device)[
                    places
                ]
                counted[name] = self._statistics_of.setdefault(name, EpisodeStatistics())
                counted[name].update(rollout.episode_returns[own], rollout.episode_lengths[own])
        return counted

    def _scaled(self, rollout: Rollout) -> Rollout:
        """The rollout with its rewards normalised and clipped, as far as they are to be."""
        rewards, limit = self._normalized(rollout), self.config.clip_rewards
        return replace(rollout, rewards=rewards if limit is None else rewards.clamp(-limit, limit))

    def _normalized(self, rollout: Rollout) -> Tensor:
        """The rewards, normalised if they are to be; statistics take them in before."""
        normalizer = self.policy.reward_normalizer
        if normalizer is None:
            return rollout.rewards
        if self._discounted is None or len(self._discounted) != rollout.num_envs:
            self._discounted = rollout.rewards.new_zeros(rollout.num_envs, dtype=torch.float64)
        # Only the rows that were made: a step that was not made discounts nothing.
        valid, ended = rollout.valid[: rollout.made], (rollout.terminated | rollout.truncated)[: rollout.made]
        returns, carry = running_returns(
            rollout.rewards[: rollout.made], valid, ended, self.config.gamma, self._discounted
        )
        self._discounted = carry.nan_to_num(0.0, 0.0, 0.0)
        normalizer.update(returns, valid)
        normalized: Tensor = normalizer(rollout.rewards)
        return normalized

    def state_dict(self) -> dict[str, Any]:
        """Counters, statistics and this rank's shuffling, for a checkpoint.

        Returns:
            ``rows``: what there is of each environment, tensors [N], while episodes are under way.
        """
        statistics = {"": self._statistics, **self._statistics_of}
        return {
            "env_steps": self.env_steps,
            "iterations": self._iterations,
            "shuffling": self._generator.get_state(),
            "statistics": {name: dict(of.state_dict()) for name, of in statistics.items()},
            "rows": {} if self._discounted is None else {"discounted": self._discounted.cpu().clone()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` left off.

        Args:
            state: Without what is missing: a generator that is, stays as it is, and without ``rows`` new
                episodes have begun.
        """
        self.env_steps, self._iterations = state["env_steps"], state["iterations"]
        if "shuffling" in state:
            set_generator(self._generator, state["shuffling"])
        for name, saved in state["statistics"].items():
            if name:
                self._statistics_of[name] = EpisodeStatistics()
            (self._statistics_of[name] if name else self._statistics).load_state_dict(saved)
        if "discounted" in state.get("rows", {}):
            self._discounted = state["rows"]["discounted"].to(self.policy.device)


def _read(named: dict[str, Tensor]) -> Metrics:
    """The values of scalars on the host, in one transfer for each device; NaN stands for "none yet"."""
    by_device: dict[torch.device, list[str]] = {}
    for name, value in named.items():
        by_device.setdefault(value.device, []).append(name)
    metrics: Metrics = {}
    for names in by_device.values():
        metrics |= dict(
            zip(names, torch.stack([named[name].double() for name in names]).tolist(), strict=True)
        )
    return {name: metrics[name] for name in named if metrics[name] == metrics[name]}
