"""The strategies' options arrive, and none of them changes what is learned."""

from collections import Counter
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from puffer_lightning.engines import DDP, PPO, FabricDDP, RolloutDataModule, iterations
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import Rollout
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import make_run, quiet_trainer

Engine = Literal["trainer", "fabric"]
ENGINES: tuple[Engine, ...] = ("trainer", "fabric")
ITERATIONS, EPOCHS, MINIBATCHES = 2, 2, 2
HARMLESS: dict[str, dict[str, Any]] = {
    "view": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 0.001},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train(
    engine: Engine, strategy: dict[str, Any], options: dict[str, Any], num_iterations: int = ITERATIONS
) -> tuple[PPO, RolloutDataModule, Any]:
    """A run on this rank of two; also the strategy."""
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", num_iterations, RANKS, **options)
    if engine == "trainer":
        trainer = quiet_trainer(strategy=DDP(**strategy), devices=RANKS)
        trainer.fit(model, datamodule=data)
        return model, data, trainer.strategy
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=FabricDDP(**strategy))
    fabric.launch()
    *_, _ = iterations(fabric, model, data)
    data.close()
    return model, data, fabric.strategy


def weights(model: PPO) -> Any:
    return nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy().copy()


def trained(rank: int, engine: Engine, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    return weights(train(engine, strategy, options)[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_no_option_but_compression_changes_a_bit_of_what_is_learned(engine: Engine) -> None:
    plain = run_ranks(trained, engine, {}, {})[0]
    for name, strategy in HARMLESS.items():
        for of_rank in run_ranks(trained, engine, strategy, {}):
            assert np.array_equal(of_rank, plain), name


@pytest.mark.parametrize("comm_hook", ["fp16", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_compression_changes_a_little_and_the_ranks_alike(engine: Engine, comm_hook: str) -> None:
    plain = run_ranks(trained, engine, {}, {})[0]
    one, other = run_ranks(trained, engine, {"comm_hook": comm_hook}, {"sync_check_every": 1})
    assert np.array_equal(one, other)
    assert 0 < np.abs(one - plain).max() < 1e-2


def refused(rank: int, engine: Engine) -> str:
    try:
        train(engine, {"static_graph": True}, {"accumulate_grad_batches": 2})
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_static_graph_with_accumulation_is_refused_as_ddp_would_reduce_nothing(engine: Engine) -> None:
    for said in run_ranks(refused, engine):
        assert said.startswith("static_graph does not go with accumulate_grad_batches")


def collectives(rank: int, engine: Engine, strategy: dict[str, Any], options: dict[str, Any]) -> Counter[str]:
    """How often each collective ran in one iteration, those that DDP starts by itself included."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(engine, strategy, options, num_iterations=1)
    return Counter(
        event.name for event in profiler.events() if event.name.startswith(("gloo:", "shared_memory:"))
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulation_costs_no_collective(engine: Engine) -> None:
    once = run_ranks(collectives, engine, {}, {})
    parts = run_ranks(collectives, engine, {}, {"accumulate_grad_batches": 4})
    assert once == parts
    assert once[0] == once[1]


def test_an_optimizer_step_reduces_gradients_once_and_broadcasts_nothing() -> None:
    few, many = (
        run_ranks(collectives, "fabric", {}, {"update_epochs": epochs, "normalize_observations": True})[0]
        for epochs in (EPOCHS, EPOCHS + 3)
    )
    assert many - few == Counter({"shared_memory:all_reduce": 3 * MINIBATCHES})


def settings(rank: int) -> dict[str, Any]:
    strategy = DDP(bucket_cap_mb=7, gradient_as_bucket_view=True, find_unused_parameters=True)
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            seen.update(vars(trainer.strategy.model))

    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 1, RANKS)
    quiet_trainer(strategy=strategy, devices=RANKS, callbacks=[Look()]).fit(model, datamodule=data)
    names = ("bucket_bytes_cap", "gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    return {name: seen[name] for name in names}


def test_options_reach_ddp() -> None:
    assert run_ranks(settings)[1] == {
        "bucket_bytes_cap": 7 * 1024 * 1024,
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
        "static_graph": False,
    }


@pytest.mark.parametrize("ours", [DDP, FabricDDP])
def test_backend_and_timeout_reach_the_process_group(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def init_process_group(backend: str, **options: Any) -> None:
        asked.update(options, backend=backend)

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    strategy = ours(process_group_backend="mpi", timeout=timedelta(seconds=77))
    Fabric(accelerator="cpu", devices=1, strategy=strategy) if ours is FabricDDP else quiet_trainer(
        strategy=strategy, devices=1
    )
    strategy.setup_environment()
    assert (asked["backend"], asked["timeout"]) == ("mpi", timedelta(seconds=77))


@pytest.mark.parametrize("name", ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_lightnings_names_stand_for_ours(name: str) -> None:
    assert type(L.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy) is DDP
    assert type(Fabric(accelerator="cpu", devices=2, strategy=name).strategy) is FabricDDP


def buffers_sent(rank: int) -> tuple[bool, bool]:
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    model, data = make_run("CartPole-v1", 1)
    model.build(data)
    data.close()
    of_policy = fabric.strategy.setup_module(model.policy)
    of_others = fabric.strategy.setup_module(nn.BatchNorm1d(3))
    return of_policy.broadcast_buffers, of_others.broadcast_buffers


def test_buffers_of_other_modules_are_sent_as_ever() -> None:
    assert run_ranks(buffers_sent) == [(False, True)] * RANKS


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="comm_hook is 'int8': set it to none, fp16, bf16 or"):
        DDP(comm_hook="int8")  # type: ignore[arg-type]


def starting_weights(rank: int, engine: Engine) -> tuple[list[float], list[float]]:
    """A weight and a count before and at the first rollout, where rank 1 was given others."""
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 1, RANKS, normalize_observations=True)
    model.build(data)
    data.close()
    assert model.policy.observation_normalizer is not None
    [weight, *_] = model.policy.parameters()
    count = model.policy.observation_normalizer.moments.count
    with torch.no_grad():
        weight.fill_(rank + 1)
        count.fill_(rank + 1)
    before, seen = [weight[0, 0].item(), count.item()], []
    collect = data.collect

    def look(*arguments: Any) -> Rollout:
        seen.extend([weight[0, 0].item(), count.item()])
        return collect(*arguments)

    data.collect = look  # type: ignore[method-assign]
    if engine == "trainer":
        quiet_trainer(strategy="ddp", devices=RANKS).fit(model, datamodule=data)
    else:
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        fabric.launch()
        *_, _ = iterations(fabric, model, data)
        data.close()
    return before, seen


@pytest.mark.parametrize("engine", ENGINES)
def test_training_starts_from_rank_0s_weights_and_statistics(engine: Engine) -> None:
    assert run_ranks(starting_weights, engine) == [([1.0, 1.0], [1.0, 1.0]), ([2.0, 2.0], [1.0, 1.0])]
