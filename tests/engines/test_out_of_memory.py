"""Memory that suffices for a few rows at a time, simulated on one rank or on two, under both engines."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.distributed import finish_reduction, rank
from puffer_lightning.engines import DDP, PPO, FabricDDP, iterations
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Evaluation, MLPPolicy
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import make_run, quiet_trainer, without_time

Engine = Literal["trainer", "fabric"]
Where = Literal["forward", "loss", "backward"]
ENGINES = pytest.mark.parametrize("engine", ["trainer", "fabric"])
# 64 rows a minibatch, so 4 microbatches are the fewest that fit.
ROWS, PARTS = 20, 4


@contextmanager
def room_for(rows: int, where: Where) -> Iterator[None]:
    """Run out of memory in a forward pass of more rows, after it, or in the midst of its backward pass."""
    evaluate, asked = MLPPolicy.evaluate, 0

    def run_out(gradient: Tensor | None = None) -> None:
        if asked > rows:
            raise torch.OutOfMemoryError("CUDA out of memory, or so it seems.")

    def evaluate_few(self: MLPPolicy, observations: Tensor, *arguments: Any) -> Evaluation:
        nonlocal asked
        asked = len(observations)
        if where == "forward":
            run_out()
        evaluated = evaluate(self, observations, *arguments)
        if where == "backward" and not hasattr(self, "watched"):
            # Other parameters have their gradients by then.
            self.watched = next(iter(self.parameters())).register_hook(run_out)  # type: ignore[assignment]
        if where == "loss":
            evaluated.values.register_hook(run_out)
        return evaluated

    with mock.patch.object(MLPPolicy, "evaluate", evaluate_few):
        yield


def train(
    engine: Engine, ranks: int, few: tuple[int, ...], where: Where, rows: int = ROWS, **options: Any
) -> tuple[PPO, dict[str, float], int]:
    """The model and last metrics of a run in which these ranks have room for few rows, and warnings."""
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 3, ranks, **options)
    # In many buckets, so that some are on their way when the memory runs out.
    buckets: dict[str, Any] = {"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": True}
    metrics: dict[str, float] = {}
    with (
        warnings.catch_warnings(record=True) as caught,
        room_for(rows if rank() in few else 10**6, where),
    ):
        warnings.simplefilter("always")
        if engine == "trainer":
            trainer = quiet_trainer(devices=ranks, strategy=DDP(**buckets) if ranks > 1 else "auto")
            trainer.fit(model, datamodule=data)
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        else:
            strategy = FabricDDP(**buckets) if ranks > 1 else "auto"
            fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
            fabric.launch()
            for latest in iterations(fabric, model, data):
                metrics = latest
            data.close()
    return model, without_time(metrics), sum("Out of memory" in str(warning.message) for warning in caught)


def weights_of(model: PPO) -> list[Tensor]:
    return [parameter.detach() for parameter in model.policy.parameters()]


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@ENGINES
def test_the_microbatch_is_halved_and_the_run_is_the_same(engine: Engine, where: Where) -> None:
    undisturbed, metrics, said = train(engine, 1, (), where)
    assert (undisturbed.config.accumulate_grad_batches, said) == (1, 0)
    model, others, said = train(engine, 1, (0,), where)
    assert (model.config.accumulate_grad_batches, said) == (PARTS, 1)
    assert_close(weights_of(model), weights_of(undisturbed), rtol=0, atol=1e-6)
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def on_rank(
    process: int, engine: Engine, few: tuple[int, ...], where: Where, accumulate: int
) -> tuple[list[Tensor], dict[str, float], tuple[int, int], list[int]]:
    """Weights, metrics, microbatches and warnings, and how many gradients were not yet on their way."""
    late: list[int] = []

    def counted(module: Any, parameters: Any) -> None:
        late.append(len(parameters))
        finish_reduction(module, parameters)

    with mock.patch(
        f"puffer_lightning.engines.{engine.replace('trainer', 'module')}.finish_reduction", counted
    ):
        model, metrics, said = train(engine, RANKS, few, where, accumulate_grad_batches=accumulate)
    return weights_of(model), metrics, (model.config.accumulate_grad_batches, said), late


@pytest.mark.parametrize("few", [(1,), (0, 1)])
@pytest.mark.parametrize("accumulate", [1, 2])
@ENGINES
def test_a_rank_finishes_what_the_other_waits_for(
    engine: Engine, accumulate: int, few: tuple[int, ...]
) -> None:
    undisturbed = run_ranks(on_rank, engine, (), "forward", accumulate)
    for where in ("forward", "loss", "backward"):
        for process, (weights, metrics, [parts, said], late) in enumerate(
            run_ranks(on_rank, engine, few, where, accumulate)
        ):
            assert_close(weights, undisturbed[process][0], rtol=0, atol=1e-6)
            assert metrics == pytest.approx(undisturbed[process][1], rel=1e-4, abs=1e-6)
            assert parts == PARTS, "from the next iteration on on all ranks"
            assert said == (process == 0)
            assert bool(late) == (process in few)
            if where == "backward" and accumulate == 1 and late:
                assert 0 < late[0] < len(weights), "some were on their way"


@ENGINES
def test_a_memory_that_does_not_suffice_for_one_row_is_an_error(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=r"Out of memory even with microbatches of 1: set data\."):
        train(engine, 1, (0,), "forward", rows=0)
