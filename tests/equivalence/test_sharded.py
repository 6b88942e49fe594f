"""Invariant 3: a policy that is sharded over ranks learns what its replicas learn, and one divided likewise.

Real processes talk through gloo.
"""

import dataclasses
from collections import Counter
from functools import partial
from typing import Any, Literal
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils._python_dispatch import TorchDispatchMode

from puffer_lightning.engines import FSDP, PPO, FabricFSDP, RolloutDataModule, iterations
from puffer_lightning.policies import LSTMPolicy, MLPPolicy, TransformerPolicy
from puffer_lightning.rollout import Rollout
from tests.distributed.processes import run_ranks
from tests.equivalence.runs import quiet_trainer, without_time

ITERATIONS, EPOCHS, MINIBATCHES, HORIZON = 3, 2, 2, 16
NUM_BLOCKS = 2

POLICIES = {
    "mlp": MLPPolicy,
    "lstm": LSTMPolicy,
    "transformer": partial(TransformerPolicy, context=6, num_blocks=NUM_BLOCKS, hidden_size=16),
}


@dataclasses.dataclass
class Run:
    """What is trained, and how; a strategy is its name or the options of ``FSDP``.

    Several ranks have num_envs environments each, unless they share them.
    """

    strategy: str | dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: str = "transformer"
    env: str = "CartPole-v1"
    num_envs: int = 8
    engine: Literal["trainer", "fabric"] = "trainer"
    precision: Any = "32-true"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    """What a rank saw of a run."""

    weights: dict[str, Any]
    metrics: dict[str, float]
    env_steps: int
    first_observations: Any
    collectives: dict[str, int]
    shares: dict[str, int]


class Collectives(TorchDispatchMode):
    """Counts what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operation.namespace in ("c10d", "_c10d_functional"):
            self.counts[operation._opname] += 1
        return operation(*arguments, **options or {})


def train(rank: int, run: Run, ranks: int) -> Outcome:
    L.seed_everything(1, verbose=False)
    tensor_parallel = run.strategy.get("tensor_parallel_size", 1) if isinstance(run.strategy, dict) else 1
    steps = ITERATIONS * HORIZON * run.num_envs * ranks // tensor_parallel
    data = RolloutDataModule(
        run.env, num_envs=run.num_envs, horizon=HORIZON, total_timesteps=steps, eval_episodes=5
    )
    model = PPO(POLICIES[run.policy], update_epochs=EPOCHS, num_minibatches=MINIBATCHES, **run.options)
    collect, firsts = data.collect, []

    def recorded(*arguments: Any) -> Rollout:
        rollout = collect(*arguments)
        firsts.append(rollout.observations[0].numpy().copy())
        return rollout

    with Collectives() as collectives, mock.patch.object(data, "collect", recorded):
        if run.engine == "trainer":
            strategy = run.strategy if isinstance(run.strategy, str) else FSDP(**run.strategy)
            trainer = quiet_trainer(
                strategy=strategy, devices=ranks, precision=run.precision, num_sanity_val_steps=0
            )
            trainer.fit(model, datamodule=data)
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        else:
            assert isinstance(run.strategy, dict)
            fabric = Fabric(
                accelerator="cpu",
                strategy=FabricFSDP(**run.strategy),
                devices=ranks,
                precision=run.precision,
            )
            fabric.launch()
            *_, metrics = iterations(fabric, model, data)
            metrics = {name: float(torch.tensor(value)) for name, value in metrics.items()}
            data.close()
    state = model.policy.state_dict()
    return Outcome(
        weights={name: whole(weights) for name, weights in state.items()},
        metrics=metrics,
        env_steps=model.env_steps,
        first_observations=firsts[0],
        collectives=dict(collectives.counts),
        shares={name: local(weights).numel() for name, weights in state.items()},
    )


def whole(weights: Any) -> Any:
    full = weights.full_tensor() if hasattr(weights, "full_tensor") else weights
    return full.detach().float().numpy().copy()


def local(weights: Any) -> Any:
    return weights.to_local() if hasattr(weights, "to_local") else weights


def outcomes(run: Run, ranks: int = 2) -> list[Outcome]:
    return run_ranks(train, run, ranks, ranks=ranks)


def assert_same(found: list[Outcome], expected: Outcome, atol: float = 1e-6) -> None:
    for outcome in found:
        assert outcome.env_steps == expected.env_steps
        assert outcome.weights.keys() == expected.weights.keys()
        for name, weights in expected.weights.items():
            # Sums of squares are large: a float32's last bit of them is more than atol.
            rtol = 1e-6 if name.endswith("moments.squares") else 0
            np.testing.assert_allclose(outcome.weights[name], weights, rtol=rtol, atol=atol, err_msg=name)
        assert without_time(outcome.metrics) == pytest.approx(
            without_time(expected.metrics), rel=1e-3, abs=1e-5
        )


SHARDED = [
    # Its log_std would diverge if it were outside the sharded module; its normalisers are buffers.
    Run(policy="mlp", env="Pendulum-v1", options={"normalize_observations": True, "normalize_rewards": True}),
    Run(policy="lstm"),
    Run(policy="transformer"),
]


@pytest.mark.parametrize("run", SHARDED, ids=lambda run: run.policy)
def test_sharded_ranks_learn_what_replicas_learn(run: Run) -> None:
    replicated = outcomes(dataclasses.replace(run, strategy="ddp"))
    sharded = outcomes(dataclasses.replace(run, strategy="fsdp"))
    assert_same(sharded, replicated[0])
    assert sharded[0].weights.keys() >= {"head.linear.weight", "critic.bias"}
    for one, other in zip(sharded, sharded[1:] + sharded[:1], strict=True):
        assert sum(one.shares.values()) < sum(weights.size for weights in one.weights.values())
        assert not np.array_equal(one.first_observations, other.first_observations)


OPTIONS: list[dict[str, Any]] = [
    {"cpu_offload": True},
    {"activation_checkpointing": True},
    {"reshard_after_forward": False},
    {"unshard_for_rollout": False},
]


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    return outcomes(Run())


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_options_change_where_things_are_and_not_what_is_learned(
    strategy: dict[str, Any], plain: list[Outcome]
) -> None:
    assert_same(outcomes(Run(strategy=strategy)), plain[0])


def test_gradients_are_reduced_once_a_minibatch(plain: list[Outcome]) -> None:
    accumulated = outcomes(Run(options={"accumulate_grad_batches": 4}))
    assert_same(accumulated, plain[0], atol=2e-5)
    for outcome in (*plain, *accumulated):
        # Each block, and what is in none.
        reductions = ITERATIONS * EPOCHS * MINIBATCHES * (NUM_BLOCKS + 1)
        assert outcome.collectives["_reduce_scatter_base_"] == reductions


def test_parameters_are_gathered_once_for_a_rollout(plain: list[Outcome]) -> None:
    always = outcomes(Run(strategy={"unshard_for_rollout": False}))
    saved = always[0].collectives["_allgather_base_"] - plain[0].collectives["_allgather_base_"]
    # The policy acts HORIZON times in a rollout and values its end, gathering its blocks each time or once.
    # What is in no block stays gathered until the first backward pass if not told otherwise.
    assert saved == ITERATIONS * (HORIZON * NUM_BLOCKS - 1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_both_engines_train_the_same_bit_for_bit(precision: str) -> None:
    by_trainer, by_fabric = (
        outcomes(Run(policy="lstm", engine=engine, precision=precision))[0]
        for engine in ("trainer", "fabric")
    )
    assert without_time(by_trainer.metrics) == without_time(by_fabric.metrics)
    for name, weights in by_trainer.weights.items():
        assert np.array_equal(weights, by_fabric.weights[name]), name


def test_a_policy_divided_between_ranks_learns_what_a_whole_one_learns() -> None:
    single = train(0, Run(strategy="auto"), ranks=1)
    divided = outcomes(Run(strategy={"tensor_parallel_size": 2}))
    assert_same(divided, single)
    key = "blocks.0.attention.key.weight"
    assert [outcome.shares[key] for outcome in divided] == [single.shares[key] // 2] * 2
    for outcome in divided:
        assert np.array_equal(outcome.first_observations, single.first_observations)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_shards_of_divided_layers_learn_what_shards_learn(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    sharded = outcomes(Run(num_envs=8))
    both = outcomes(Run(strategy={"tensor_parallel_size": 2}, num_envs=8, options=options), ranks=4)
    assert_same(both, sharded[0], atol=1e-6 if accumulate == 1 else 2e-5)
    for row in range(2):
        for column in range(2):
            first = both[2 * row + column].first_observations
            assert np.array_equal(first, sharded[row].first_observations)
