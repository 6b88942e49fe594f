import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from puffer_lightning.engines import PPO, PhaseProfiler, profiling
from puffer_lightning.engines.profiling import measure_with
from puffer_lightning.rollout import unmeasured
from tests.callbacks.runs import data, heard, trainer

HORIZON, UPDATES = 32, 4 * 4


def fit(folder: Path, profiler: Any, iterations: int = 3, **options: Any) -> PPO:
    model = PPO()
    run = trainer(folder=folder, profiler=profiler)
    run.fit(model, datamodule=data(iterations, **options))
    return model


def test_where_nobody_measures_functions_stay_what_they_are(tmp_path: Path) -> None:
    function = len
    assert measure_with(trainer(folder=tmp_path))("update/step", function) is function
    assert unmeasured("update/step", function) is function


def test_lightnings_profilers_see_the_phases(tmp_path: Path) -> None:
    fit(tmp_path, profiler := SimpleProfiler())
    calls = {name: len(times) for name, times in profiler.recorded_durations.items() if "/" in name}
    assert calls == {
        "rollout/env": 3 * HORIZON,
        "rollout/policy": 3 * (HORIZON + 2),
        "rollout/copy": 3 * 4 * HORIZON,
        "update/gather": 3 * UPDATES,
        "update/forward": 3 * UPDATES,
        "update/backward": 3 * UPDATES,
        "update/step": 3 * 2 * UPDATES,
    }


def test_overlapped_rollouts_are_measured_too(tmp_path: Path) -> None:
    fit(tmp_path, profiler := PhaseProfiler(), env="Acrobot-v1", num_workers=2, overlap="halves")
    assert min(profiler.milliseconds()[f"rollout/{phase}"] for phase in ("env", "policy", "copy")) > 0


def test_phases_add_up_to_an_iteration(tmp_path: Path) -> None:
    with heard() as said:
        fit(tmp_path, profiler := PhaseProfiler(), iterations=4)
    of = profiler.milliseconds()
    for part in ("rollout", "update"):
        phases = [value for name, value in of.items() if name.startswith(f"{part}/")]
        assert min(phases) > 0
        assert sum(phases) == pytest.approx(of[part])
    assert of["rollout"] + of["update"] + of["other"] == pytest.approx(of["iteration"])
    assert "Mean of 2 iterations" in said.getvalue()


def test_time_goes_to_the_phase_that_takes_it(tmp_path: Path) -> None:
    class Slow(PPO):
        def on_train_start(self) -> None:
            super().on_train_start()
            backward = self._backward or torch.Tensor.backward
            self._backward = lambda loss: (time.sleep(0.01), backward(loss))

    profiler = PhaseProfiler()
    trainer(folder=tmp_path, profiler=profiler).fit(Slow(), datamodule=data(2))
    assert profiler.milliseconds()["update/backward"] >= 10 * UPDATES


@pytest.mark.parametrize(
    ("seconds", "mean"), [((5.0,), 5000.0), ((5.0, 0.001), 1.0), ((5.0, 7.0, 0.001, 0.003), 2.0)]
)
def test_the_first_two_iterations_are_left_out_where_there_are_more(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], mean: float
) -> None:
    clock = [0.0]
    monkeypatch.setattr(profiling, "_now", lambda: clock[0])
    profiler = PhaseProfiler()
    for each in seconds:
        with profiler.profile("run_training_epoch"), profiler.profile("rollout"):
            clock[0] += each
    assert profiler.milliseconds()["rollout"] == pytest.approx(mean)


def test_a_profiler_that_measures_nothing_stands_in_for_lightnings(tmp_path: Path) -> None:
    run = trainer(folder=tmp_path, profiler=None)
    run.fit(PPO(), datamodule=data(1))
    assert isinstance(run.profiler, profiling.NoProfiler)
    run = trainer(folder=tmp_path, profiler=(given := SimpleProfiler()))
    run.fit(PPO(), datamodule=data(1))
    assert run.profiler is given


def test_measuring_changes_no_number(tmp_path: Path) -> None:
    plain, measured = fit(tmp_path, None), fit(tmp_path, PhaseProfiler())
    pairs = zip(plain.parameters(), measured.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
