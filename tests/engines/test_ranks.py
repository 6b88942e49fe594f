"""What two ranks share, check and scale, under both engines."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric

from puffer_lightning.distributed import rank
from puffer_lightning.engines import iterations
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.ppo import Metrics
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import make_run, quiet_trainer

Engine = Literal["trainer", "fabric"]
BOTH = pytest.mark.parametrize("engine", ["trainer", "fabric"])


def train(engine: Engine, num_iterations: int = 2, act: Any = None, **options: Any) -> Metrics:
    """The metrics of a run on this rank of two; ``act(model)`` is called after each iteration."""
    model, data = make_run("CartPole-v1", num_iterations, RANKS, **options)
    if engine == "trainer":
        callback = L.Callback()
        callback.on_train_batch_end = lambda *_: act and act(model)  # type: ignore[method-assign]
        trainer = quiet_trainer(strategy="ddp", devices=RANKS, callbacks=[callback])
        trainer.fit(model, datamodule=data)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
    fabric.launch()
    metrics: Metrics = {}
    for latest in iterations(fabric, model, data):
        metrics = latest
        if act:
            act(model)
    data.close()
    return metrics


def failure(process: int, engine: Engine, sync_check_every: int, options: dict[str, Any]) -> tuple[str, int]:
    """What ends a run in which rank 1 changes a weight on its own after the first iteration, and when."""
    L.seed_everything(1, verbose=False)
    made = 0

    def change(model: Any) -> None:
        nonlocal made
        made += 1
        if made == 1 and rank() == 1:
            with torch.no_grad():
                model.policy.critic.weight[0, 0] += 1e-6

    try:
        train(engine, 5, change, sync_check_every=sync_check_every, **options)
    except RuntimeError as error:
        return str(error), made
    return "", made


@BOTH
def test_drift_ends_the_run_at_the_next_check_and_names_the_parameter(engine: Engine) -> None:
    frozen = {"optimizer": SGD(0.0)}
    for said, iterations_made in run_ranks(failure, engine, 3, frozen):
        assert said.startswith("The ranks have drifted apart: critic.weight not the same on all of them")
        assert iterations_made == 2


class SGD:
    """Makes an optimizer; of no steps at all if the learning rate is 0."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.lr)


def unchecked(process: int) -> str:
    return failure(process, "fabric", 0, {})[0]


def test_nothing_is_checked_unasked() -> None:
    assert run_ranks(unchecked) == ["", ""]


def refused(process: int, engine: Engine, options: list[dict[str, Any]]) -> str:
    L.seed_everything(1, verbose=False)
    try:
        train(engine, **options[process])
    except ConfigurationError as error:
        return str(error)
    return ""


@BOTH
def test_ranks_of_other_coefficients_or_sizes_are_refused_in_a_script_too(engine: Engine) -> None:
    for said in run_ranks(refused, engine, [{"gamma": 0.9}, {"gamma": 0.8, "num_iterations": 3}]):
        assert "model.gamma is 0.9 on rank 0 and 0.8 on rank 1" in said
        assert "data.total_timesteps is 512 on rank 0 and 768 on rank 1" in said


def seeded_apart(process: int, engine: Engine) -> Metrics:
    torch.manual_seed(100 + process)
    metrics = train(engine, sync_check_every=1)
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_ranks_that_were_seeded_apart_train_with_rank_0s_seed() -> None:
    one, other = run_ranks(seeded_apart, "fabric")
    assert one == other


def first_learning_rate(process: int, engine: Engine, lr_scaling: str) -> float:
    L.seed_everything(1, verbose=False)
    metrics = train(engine, 1, lr_scaling=lr_scaling, optimizer=SGD(0.01), lr_schedule="constant")
    return metrics["train/learning_rate"]


@BOTH
@pytest.mark.parametrize(("lr_scaling", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_learning_rate_grows_with_the_ranks(engine: Engine, lr_scaling: str, factor: float) -> None:
    for learning_rate in run_ranks(first_learning_rate, engine, lr_scaling):
        assert learning_rate == pytest.approx(0.01 * factor)


def warmed_up(process: int) -> list[float]:
    L.seed_everything(1, verbose=False)
    model, data = make_run(
        "CartPole-v1",
        4,
        RANKS,
        lr_scaling="linear",
        warm_up_share=0.5,
        lr_schedule="constant",
        optimizer=SGD(1.0),
    )
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
    fabric.launch()
    rates = [metrics["train/learning_rate"] for metrics in iterations(fabric, model, data)]
    data.close()
    return rates


def test_warm_up_ends_at_the_scaled_learning_rate() -> None:
    assert run_ranks(warmed_up)[0] == pytest.approx([0.2, 1.1, 2.0, 2.0])


def resumed(process: int, checkpoints: list[Path]) -> str:
    L.seed_everything(1, verbose=False)
    model, data = make_run("CartPole-v1", 4, RANKS)
    try:
        quiet_trainer(strategy="ddp", devices=RANKS).fit(
            model, datamodule=data, ckpt_path=str(checkpoints[process])
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ranks_that_resume_from_other_checkpoints_are_refused(tmp_path: Path) -> None:
    checkpoints = []
    for num_iterations in (1, 2):
        L.seed_everything(1, verbose=False)
        model, data = make_run("CartPole-v1", num_iterations)
        trainer = quiet_trainer(devices=1)
        trainer.fit(model, datamodule=data)
        checkpoints.append(tmp_path / f"{num_iterations}.ckpt")
        trainer.save_checkpoint(checkpoints[-1])
    for said in run_ranks(resumed, checkpoints):
        assert "ckpt_path's environment steps is 128 on rank 0 and 256 on rank 1" in said
    assert run_ranks(resumed, checkpoints[:1] * 2) == ["", ""]
