"""A slow rank is preempted, and each step that was made weighs as much as any other."""

import copy
import time
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from lightning.fabric import Fabric
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from puffer_lightning.distributed import rank
from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.functional import gae, masked_sums, mean_and_std
from puffer_lightning.ppo import minibatch_loss
from puffer_lightning.rollout import Batch, Rollout
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import quiet_trainer

NUM_ENVS, HORIZON, LR = 4, 16, 100.0


class SlowOnRank1(CartPoleVectorEnv):
    def step(self, *arguments: Any) -> Any:
        time.sleep(0.03 * rank())
        return super().step(*arguments)


def run(total_timesteps: int, **options: Any) -> tuple[PPO, RolloutDataModule, list[Rollout]]:
    """A module, and data that keep a copy of each rollout."""
    L.seed_everything(1, verbose=False)
    data = RolloutDataModule(
        SlowOnRank1,
        num_envs=NUM_ENVS,
        horizon=HORIZON,
        total_timesteps=total_timesteps,
        preempt_at=0.5,
    )
    collect, rollouts = data.collect, []

    def recorded(*arguments: Any) -> Rollout:
        rollout = collect(*arguments)
        rollouts.append(copy.deepcopy(rollout))
        return rollout

    data.collect = recorded  # type: ignore[method-assign]
    return PPO(**options), data, rollouts


def one_update(process: int) -> tuple[Any, Any, Rollout, int]:
    """Weights before and after one optimizer step over all there is, and the rollout of this rank."""
    options = {"update_epochs": 1, "num_minibatches": 1, "max_grad_norm": 1e9, "lr_schedule": "constant"}
    model, data, rollouts = run(1, optimizer=lambda params: torch.optim.SGD(params, LR), **options)
    model.build(data)
    before = tree_map(lambda tensor: tensor.numpy().copy(), dict(model.policy.state_dict()))
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    *_, _ = iterations(fabric, model, data)
    data.close()
    after = tree_map(lambda tensor: tensor.numpy().copy(), dict(model.policy.state_dict()))
    return before, after, rollouts[0], model.env_steps


def test_the_update_is_that_on_all_steps_that_were_made() -> None:
    (before, after, whole, env_steps), (*_, cut, _) = run_ranks(one_update)
    assert whole.made == HORIZON
    assert HORIZON // 4 <= cut.made < HORIZON
    assert env_steps == (whole.made + cut.made) * NUM_ENVS
    model = PPO()
    data = RolloutDataModule("CartPole-v1", num_envs=NUM_ENVS, horizon=HORIZON)
    model.build(data)
    data.close()
    model.policy.load_state_dict({name: torch.from_numpy(array) for name, array in before.items()})
    made = {name: torch.from_numpy(before[name] - after[name]) / LR for name in before}
    batches = [flat(whole), flat(cut)]
    # All but state and started, which only policies with memory have.
    everything = Batch(*(torch.cat(parts) for parts in zip(*(of[:-2] for of in batches), strict=True)))
    moments = mean_and_std(masked_sums(everything.advantages, everything.valid))

    def gradients(batch: Batch) -> dict[str, torch.Tensor]:
        """Of the mean over the batch."""
        model.policy.zero_grad()
        loss, _ = minibatch_loss(model.policy, batch, *moments, 1.0 / batch.valid.sum(), model.config)
        torch.autograd.backward(loss)
        parameters = model.policy.named_parameters()
        return {name: p.grad.clone() for name, p in parameters if p.grad is not None}

    expected, mistaken = gradients(everything), [gradients(batch) for batch in batches]
    for name, gradient in expected.items():
        assert_close(made[name], gradient, rtol=1e-3, atol=1e-6)
    means_of_ranks = sum(of_rank["critic.weight"] for of_rank in mistaken) / RANKS
    assert (means_of_ranks - expected["critic.weight"]).abs().max() > 1e-4


def flat(rollout: Rollout) -> Batch:
    """The steps that a rollout made, as if it had been no longer."""
    names = ("rewards", "values", "next_values", "terminated", "truncated", "valid", "log_probs", "actions")
    made = {name: getattr(rollout, name)[: rollout.made] for name in (*names, "observations")}
    rewards, values, *rest = (made[name] for name in names[:5])
    advantages = gae(rewards.where(made["valid"], 0.0), values, *rest, 0.99, 0.95)
    parts = (made["observations"], made["actions"], made["log_probs"], values, advantages)
    return Batch(*(part.flatten(0, 1) for part in (*parts, advantages + values, made["valid"])))


def several_iterations(process: int) -> tuple[list[int], int, Any]:
    model, data, rollouts = run(
        6 * NUM_ENVS * HORIZON, update_epochs=2, num_minibatches=2, sync_check_every=1
    )
    quiet_trainer(strategy="ddp", devices=RANKS).fit(model, datamodule=data)
    weights = torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy().copy()
    return [rollout.made for rollout in rollouts], model.env_steps, weights


@pytest.mark.slow
def test_the_ranks_stay_together_and_the_run_lasts_as_many_steps_as_asked_for() -> None:
    (whole, env_steps, weights), (cut, also, other) = run_ranks(several_iterations)
    assert set(whole) == {HORIZON}
    assert max(cut) < HORIZON
    assert len(whole) == len(cut) > 3, "three would have done, had no rollout been cut short"
    assert env_steps == also == (sum(whole) + sum(cut)) * NUM_ENVS
    assert 6 * NUM_ENVS * HORIZON <= env_steps < 8 * NUM_ENVS * HORIZON
    assert np.array_equal(weights, other)
