"""Invariant 2 through the Trainer: three whole iterations on two ranks are those on one, for the same sample.

Environments correspond by construction: they are seeded by their place among those of all ranks. Action noise
and shuffles are drawn by each rank for itself, so here they are made to correspond: each rank takes its
environments' columns of noise that is drawn for all of them, and the one rank visits, in each minibatch, what
the two visit in theirs.
"""

from importlib import import_module
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.distributed import derive_seed, rank, world_size
from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import shuffled_indices
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import quiet_trainer, without_time

SEED, NUM_ENVS, HORIZON, ITERATIONS, EPOCHS, MINIBATCHES = 3, 8, 16, 3, 2, 2


def policy_with_noise_by_environment(*spaces: Any) -> Any:
    policy = make_policy(*spaces)
    generator, fill = torch.Generator().manual_seed(SEED), policy.head.fill_noise

    def fill_own_columns(noise: Tensor, _: torch.Generator) -> None:
        everywhere = noise.new_zeros(HORIZON, NUM_ENVS, noise.shape[-1])
        fill(everywhere, generator)
        noise.copy_(everywhere.chunk(world_size(), dim=1)[rank()])

    policy.head.fill_noise = fill_own_columns  # type: ignore[method-assign]
    return policy


def trained(process: int, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The policy's state and the metrics after three iterations, on however many ranks there are."""
    L.seed_everything(SEED, verbose=False)
    # Episodes that are truncated after ten steps, each environment of the vector seeded on its own.
    data = RolloutDataModule(
        "Acrobot-v1",
        env_kwargs={"max_episode_steps": 10},
        num_envs=NUM_ENVS,
        split_envs=True,
        horizon=HORIZON,
        total_timesteps=ITERATIONS * NUM_ENVS * HORIZON,
    )
    model = PPO(
        policy_with_noise_by_environment,
        update_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        normalize_observations=True,
        normalize_rewards=True,
        **options,
    )
    trainer = quiet_trainer(strategy="ddp" if world_size() > 1 else "auto", devices=world_size())
    trainer.fit(model, datamodule=data)
    state = {name: tensor.numpy().copy() for name, tensor in model.policy.state_dict().items()}
    return state, without_time({name: value.item() for name, value in trainer.callback_metrics.items()})


def trained_on_one_rank(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The same with the minibatches of the two ranks together."""
    generators = [torch.Generator().manual_seed(derive_seed(SEED, "minibatches", r)) for r in range(RANKS)]
    own = NUM_ENVS // RANKS

    def visited_by_both(size: int, epochs: int, _: torch.Generator) -> Tensor:
        of_ranks = []
        for r, generator in enumerate(generators):
            local = shuffled_indices(size // RANKS, epochs, generator)
            everywhere = local // own * NUM_ENVS + r * own + local % own
            of_ranks.append(everywhere.view(epochs, MINIBATCHES, -1))
        return torch.cat(of_ranks, dim=-1).flatten(1)

    module = import_module("puffer_lightning.ppo.update")
    with mock.patch.object(module, "shuffled_indices", visited_by_both):
        return trained(0, options)


def test_two_ranks_with_half_of_the_environments_each_train_as_one_with_all() -> None:
    for options in ({}, {"accumulate_grad_batches": 4}):
        state, metrics = trained_on_one_rank(options)
        assert metrics["rollout/episodes"] == NUM_ENVS * (ITERATIONS * HORIZON // 10)
        for of_rank, metrics_of_rank in run_ranks(trained, options):
            for name, value in state.items():
                assert_close(torch.from_numpy(of_rank[name]), torch.from_numpy(value), rtol=1e-6, atol=1e-6)
            assert metrics_of_rank.keys() == metrics.keys()
            for name, value in metrics.items():
                assert abs(metrics_of_rank[name] - value) <= 2e-5 * max(1.0, abs(value)), name
