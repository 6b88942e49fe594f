"""Invariant 2: two ranks with half of the environments each are one rank with all of them.

Two real processes talk through gloo.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from puffer_lightning.distributed import global_sum, world_size
from puffer_lightning.engines import iterations
from puffer_lightning.ppo import PPOConfig, minibatch_loss, update
from puffer_lightning.rollout import Rollout, shuffled_indices
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import STEPS_PER_ITERATION, make_run, quiet_trainer, without_time
from tests.transitions import ExactPolicy, parameters_of, random_rollout

ITERATIONS, EPOCHS, MINIBATCHES = 3, 2, 2
ENGINES = ("trainer", "fabric")

Engine = Literal["trainer", "fabric"]


@dataclasses.dataclass
class Outcome:
    """What a rank saw of a run."""

    weights: dict[str, Any]
    metrics: dict[str, float]
    first_observations: Any
    first_actions: Any
    reductions: int
    env_steps: int


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Sizes of the gradients that DDP sends to the other ranks."""
    sizes: list[int] = []
    register = DistributedDataParallel.register_comm_hook

    def register_counting(self: DistributedDataParallel, state: object, hook: Any) -> None:
        def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            sizes.append(bucket.buffer().numel())
            return hook(state, bucket)  # type: ignore[no-any-return]

        register(self, state, reduce)

    with mock.patch.object(DistributedDataParallel, "register_comm_hook", register_counting):
        yield sizes


def train(rank: int, engine: Engine, options: dict[str, Any]) -> Outcome:
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", ITERATIONS, RANKS, **options)
    collect, firsts = data.collect, []

    def recorded(*arguments: Any) -> Rollout:
        rollout = collect(*arguments)
        firsts.append((rollout.observations[0].numpy().copy(), rollout.actions.numpy().copy()))
        return rollout

    with counted_reductions() as sizes, mock.patch.object(data, "collect", recorded):
        if engine == "trainer":
            trainer = quiet_trainer(strategy="ddp", devices=RANKS)
            trainer.fit(model, datamodule=data)
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        else:
            fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
            fabric.launch()
            *_, metrics = iterations(fabric, model, data)
            data.close()
    assert len(firsts) == ITERATIONS
    weights = {name: weight.numpy().copy() for name, weight in model.policy.state_dict().items()}
    return Outcome(weights, metrics, *firsts[0], len(sizes), model.env_steps)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 4},
    "stopped early": {"target_kl": 1e-9},
}


@pytest.fixture(scope="module", params=ENGINES)
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    return {name: run_ranks(train, request.param, options) for name, options in RUNS.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize("run", RUNS)
def test_weights_stay_equal_on_all_ranks_bit_for_bit(outcomes: dict[str, list[Outcome]], run: str) -> None:
    one, other = outcomes[run]
    assert len(one.weights) > 8
    assert same(one.weights, other.weights)


@pytest.mark.parametrize("run", RUNS)
def test_metrics_are_equal_on_all_ranks(outcomes: dict[str, list[Outcome]], run: str) -> None:
    one, other = outcomes[run]
    assert without_time(one.metrics) == without_time(other.metrics)
    assert one.metrics["rollout/episodes"] > 4
    assert one.env_steps == other.env_steps == ITERATIONS * STEPS_PER_ITERATION * RANKS


def test_ranks_collect_episodes_of_their_own(outcomes: dict[str, list[Outcome]]) -> None:
    one, other = outcomes["plain"]
    firsts = np.concatenate((one.first_observations, other.first_observations))
    assert len(np.unique(firsts, axis=0)) == len(firsts) == 16
    assert not np.array_equal(one.first_actions, other.first_actions)


def test_accumulation_reduces_no_more_often(outcomes: dict[str, list[Outcome]]) -> None:
    for run in ("plain", "accumulated"):
        for outcome in outcomes[run]:
            assert outcome.reductions == ITERATIONS * EPOCHS * MINIBATCHES, run


def test_accumulation_trains_the_same(outcomes: dict[str, list[Outcome]]) -> None:
    plain, accumulated = outcomes["plain"][0], outcomes["accumulated"][0]
    for name, weight in plain.weights.items():
        np.testing.assert_allclose(accumulated.weights[name], weight, rtol=1e-3, atol=1e-5)


def test_ranks_stop_early_together(outcomes: dict[str, list[Outcome]]) -> None:
    assert [outcome.reductions for outcome in outcomes["stopped early"]] == [ITERATIONS * MINIBATCHES] * RANKS
    assert not same(outcomes["stopped early"][0].weights, outcomes["plain"][0].weights)


def test_both_engines_train_the_same_bit_for_bit() -> None:
    by_trainer, by_fabric = (run_ranks(train, engine, RUNS["accumulated"])[0] for engine in ENGINES)
    assert same(by_trainer.weights, by_fabric.weights)
    assert without_time(by_trainer.metrics) == pytest.approx(without_time(by_fabric.metrics), rel=1e-6)


NUM_ENVS, HORIZON = 8, 8


def learned(
    rollout: Rollout, generator: torch.Generator, config: PPOConfig, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    policy = ExactPolicy()

    def clip(norm: float) -> Tensor:
        for parameter in policy.parameters():
            assert parameter.grad is not None
            global_sum(parameter.grad).div_(world_size())
        return torch.nn.utils.clip_grad_norm_(policy.parameters(), norm)

    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    metrics = update(policy, optimizer, rollout, config, generator, clip=clip, **options)
    return parameters_of(policy), {name: value.item() for name, value in metrics.items()}


def part_of(rollout: Rollout, rank: int) -> Rollout:
    """The environments of one rank."""
    environments = slice(rank * NUM_ENVS // RANKS, (rank + 1) * NUM_ENVS // RANKS)
    parts: dict[str, Any] = {
        name: tensor[:, environments]
        for name, tensor in vars(rollout).items()
        if isinstance(tensor, Tensor) and tensor.ndim > 1
    }
    return dataclasses.replace(rollout, **parts)


def shuffle_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + rank)


def on_one_of_the_ranks(
    rank: int, config: PPOConfig, loss_function: Callable[..., Any] = minibatch_loss
) -> tuple[Any, dict[str, float]]:
    rollout = part_of(random_rollout(ExactPolicy(), HORIZON, NUM_ENVS), rank)
    parameters, metrics = learned(rollout, shuffle_of(rank), config, loss_function=loss_function)
    return parameters.numpy(), metrics


def on_one_rank(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, dict[str, float]]:
    """One rank whose minibatches are those of the two ranks together."""
    of_ranks = []
    for rank in range(RANKS):
        local = shuffled_indices(HORIZON * NUM_ENVS // RANKS, config.update_epochs, shuffle_of(rank))
        t, n = local // (NUM_ENVS // RANKS), local % (NUM_ENVS // RANKS)
        everywhere = t * NUM_ENVS + rank * NUM_ENVS // RANKS + n
        of_ranks.append(everywhere.view(config.update_epochs, config.num_minibatches, -1))
    order = torch.cat(of_ranks, dim=-1).flatten(1)
    assert order[0].sort().values.tolist() == list(range(HORIZON * NUM_ENVS))
    module = import_module("puffer_lightning.ppo.update")
    monkeypatch.setattr(module, "shuffled_indices", lambda size, epochs, generator: order)
    return learned(random_rollout(ExactPolicy(), HORIZON, NUM_ENVS), shuffle_of(0), config)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_two_ranks_learn_what_one_rank_learns_from_all_environments(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PPOConfig(update_epochs=2, num_minibatches=4, accumulate_grad_batches=accumulate)
    expected, expected_metrics = on_one_rank(config, monkeypatch)
    for parameters, metrics in run_ranks(on_one_of_the_ranks, config):
        assert_close(torch.from_numpy(parameters), expected, rtol=0, atol=1e-10)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5)


def mean_of_the_rank(policy: Any, batch: Any, mean: Tensor, std: Tensor, weight: Tensor, *rest: Any) -> Any:
    return minibatch_loss(policy, batch, mean, std, 1.0 / batch.valid.sum().clamp(min=1), *rest)


@pytest.mark.parametrize(
    ("normalize_advantages", "loss_function"), [("rank", minibatch_loss), ("global", mean_of_the_rank)]
)
def test_moments_and_means_of_a_rank_alone_do_not(
    normalize_advantages: Literal["rank", "global"],
    loss_function: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PPOConfig(update_epochs=2, num_minibatches=4)
    expected, _ = on_one_rank(config, monkeypatch)
    mistaken = dataclasses.replace(config, normalize_advantages=normalize_advantages)
    (parameters, _), _ = run_ranks(on_one_of_the_ranks, mistaken, loss_function)
    assert (torch.from_numpy(parameters) - expected).abs().max() > 1e-4


def kl_and_passes(rank: int, target_kl: float | None) -> tuple[float, float, int]:
    """A rank's KL in the first pass, that of all ranks, and the number of passes that the rank made."""
    config = PPOConfig(update_epochs=3, num_minibatches=4, target_kl=target_kl)
    kls: list[float] = []

    def recorded(*arguments: Any) -> Any:
        loss, statistics = minibatch_loss(*arguments)
        kls.append(statistics[3].item())
        return loss, statistics

    rollout = part_of(random_rollout(ExactPolicy(), HORIZON, NUM_ENVS), rank)
    learned(rollout, shuffle_of(rank), config, loss_function=recorded)
    own = sum(kls[:4]) / 4
    return own, global_sum(torch.tensor(own)).item() / RANKS, len(kls) // 4


def test_ranks_stop_together_even_where_only_one_of_them_moved_too_far() -> None:
    (one, mean, passes), (other, *_) = run_ranks(kl_and_passes, None)
    assert passes == 3
    low, high = sorted((one, other))
    for target, stops_at_once in (((low + mean) / 2, True), ((high + mean) / 2, False)):
        assert low < target < high, "each rank alone would decide otherwise"
        made = [count for _, _, count in run_ranks(kl_and_passes, target)]
        assert made[0] == made[1]
        assert (made[0] == 1) == stops_at_once
