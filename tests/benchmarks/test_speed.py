import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from puffer_lightning.functional import gae

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of ``benchmarks/sides``."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"sides.{name}")


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestClock:
    @pytest.fixture
    def clock(self, sides: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = sides("clock")
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
        work = replace(sides("work").ROWS["small"].work, warm_up=1, probes=2, iterations=3)
        return module.Clock(work)

    @pytest.mark.parametrize(("slower", "faster"), [(1, 2), (2, 1)])
    def test_takes_the_number_of_threads_that_was_faster(self, clock: Any, slower: int, faster: int) -> None:
        used = []
        while not clock.tick():
            used.append(torch.get_num_threads())
            self.now += 5.0 if len(used) == 1 else 2.0 if used[-1] == slower else 1.0
        assert used[1:5] == [1, 2, 1, 2]
        assert used[5:] == [faster] * 3
        result = clock.result(7.0)
        assert (result["seconds"], result["threads"], result["return"]) == (3.0, faster, 7.0)
        assert result["sps"] == 4 * 128


def test_cleanrls_advantages_are_gae_with_nothing_bootstrapped_at_an_end(sides: Any) -> None:
    work = replace(sides("work").ROWS["small"].work, horizon=64)
    run = sides("cleanrl")._Run(work, seed=1)
    run._collect()
    advantages, _ = run._estimate()
    dones = torch.cat((run.dones[1:], run.next_done[None])).bool()
    next_values = torch.cat((run.values[1:], run.agent.value(run.next_observation).detach().T))
    never = torch.zeros_like(dones)
    expected = gae(run.rewards, run.values, next_values, dones, never, work.gamma, work.gae_lambda)
    assert dones.any()
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("row", ["large", "recurrent"])
def test_pufferlibs_advantages_are_gae_up_to_the_last_step(sides: Any, row: str) -> None:
    work = replace(sides("work").ROWS[row].work, num_envs=8, horizon=64)
    run = sides("pufferlib")._Run(work, seed=1)
    run._collect()
    terminals, rewards, values = (x[:, :-1].T for x in (run.terminals, run.rewards, run.values))
    next_values = run.values[:, 1:].T
    never = torch.zeros_like(terminals, dtype=torch.bool)
    expected = gae(rewards, values, next_values, terminals.bool(), never, work.gamma, work.gae_lambda)
    assert terminals.any()
    torch.testing.assert_close(run._advantages()[:, :-1].T, expected)


@pytest.mark.parametrize(("side", "row"), [("cleanrl", "small"), ("pufferlib", "large")])
def test_peers_learn(sides: Any, side: str, row: str) -> None:
    work = replace(
        sides("work").ROWS[row].work, num_envs=16, horizon=128, num_minibatches=8, learning_rate=2.5e-3,
        update_epochs=4, warm_up=8, iterations=2,
    )  # fmt: skip
    assert sides(side).run(work, seed=1, threads=1)["return"] > 60


@pytest.mark.parametrize("row", ["small", "large", "recurrent"])
def test_all_sides_have_networks_of_the_same_size(sides: Any, row: str) -> None:
    work = sides("work").ROWS[row].work
    peer = sides("pufferlib" if row != "small" else "cleanrl")._Run(replace(work, num_envs=2), seed=1)
    module = peer.agent if row == "small" else peer.policy
    spec = sides("ours").config(work, 1)["model"]["policy"]
    kind = getattr(importlib.import_module("puffer_lightning.policies"), spec["class_path"].split(".")[-1])
    ours = kind(peer.envs.single_observation_space, peer.envs.single_action_space, **spec["init_args"])
    sizes = [sorted(parameter.numel() for parameter in of.parameters()) for of in (ours, module)]
    assert sizes[0] == sizes[1]


class TestMeasure:
    @pytest.fixture
    def measure(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Measures a row whose sides tell nothing but what they were asked."""
        monkeypatch.syspath_prepend(BENCHMARKS)
        speed = importlib.import_module("speed")
        self.asked: list[tuple[str, int | None, str]] = []

        def run_side(side: str, request: dict[str, Any], python: str = sys.executable) -> dict[str, Any]:
            self.asked.append((side, request["threads"], python))
            told = {"sps": 1.0, "threads": request["threads"]}
            return {"puffer_lightning": told, "bare loop": told} if side == "in turn" else told

        monkeypatch.setattr(speed, "run_side", run_side)
        options = {"repeats": 2, "iterations": None, "threads": None, "pufferlib": None}
        return lambda name, **given: speed.measure(name, speed.ROWS[name], Namespace(**options | given))

    @pytest.mark.parametrize("row", ["large", "recurrent"])
    def test_a_loop_stands_in_for_pufferlib_with_its_bar(self, measure: Any, row: str) -> None:
        sides = measure(row)["sides"]
        assert "PufferLib 3.0" not in sides
        assert sides["PufferLib's loop"]["bar"] == 2.0

    @pytest.mark.parametrize("row", ["large", "recurrent"])
    def test_pufferlib_runs_in_its_own_python_and_has_the_bar(self, measure: Any, row: str) -> None:
        sides = measure(row, pufferlib=Path("/its/python"))["sides"]
        assert sides["PufferLib 3.0"]["bar"] == 2.0
        assert sides["PufferLib's loop"]["bar"] is None
        pythons = {side: python for side, _, python in self.asked}
        assert pythons.pop("PufferLib 3.0") == Path("/its/python")
        assert set(pythons.values()) == {sys.executable}

    def test_sides_of_the_same_weights_have_one_thread(self, measure: Any) -> None:
        measured = measure("framework")
        assert {threads for _, threads, _ in self.asked} == {1}
        assert [len(of["runs"]) for of in measured["sides"].values()] == [2, 2]


def test_refuses_sides_whose_weights_differ(sides: Any) -> None:
    check = sides("ours").check_same_weights
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(SystemExit, match="weights differ"):
        check(one, other)
    other.load_state_dict(one.state_dict())
    check(one, other)


def test_a_clock_that_is_paused_does_not_count_what_follows(
    sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = sides("clock").Clock(replace(sides("work").ROWS["framework"].work, warm_up=1, iterations=2), 1)
    now = iter([0, 10, 100, 102, 150, 153])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    assert not clock.begun
    for _ in range(3):
        assert not clock.tick()
        clock.pause()
    assert clock.tick()
    assert clock.seconds == 2 + 3


def test_the_command_names_no_path_of_this_machine(sides: Any) -> None:
    command = sides("report")._command
    rows, typed = ["--rows", "python envs"], "python benchmarks/speed.py --rows 'python envs' "
    for path in ("/its/python", "/its own/python"):
        assert command([*rows, "--pufferlib", path]) == f"{typed}--pufferlib PYTHON"
        assert command([*rows, f"--pufferlib={path}"]) == f"{typed}--pufferlib=PYTHON"


def test_says_that_the_loop_stands_in(sides: Any) -> None:
    report = sides("report")
    assert "stands in" in report._stand_in({"sides": {"PufferLib's loop": {}}})
    assert not report._stand_in({"sides": {"PufferLib 3.0": {}, "PufferLib's loop": {}}})
    assert not report._stand_in({"sides": {"CleanRL": {}}})


class TestPufferTrainer:
    @pytest.fixture
    def trainer(self, sides: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        # It leaves a link and a checkpoint where it is.
        monkeypatch.chdir(tmp_path)
        pytest.importorskip("pufferlib")
        monkeypatch.setattr(sys, "argv", ["puffer"])
        return sides("puffer_trainer")

    @pytest.mark.parametrize(
        ("row", "size"), [("large", 4 * 128 + 128 + 129 * 3), ("recurrent", 1027 + 4 * 128 * (2 * 128 + 2))]
    )
    def test_does_the_rows_work(self, trainer: Any, sides: Any, row: str, size: int) -> None:
        its = trainer.make_trainer(sides("work").ROWS[row].work, seed=1, iterations=3)
        its.close()
        assert (its.segments, its.minibatch_size, its.total_minibatches) == (1024, 32768, 2)
        assert its.total_epochs == 3
        assert sum(parameter.numel() for parameter in its.policy.parameters()) == size

    def test_learns(self, trainer: Any, sides: Any) -> None:
        work = replace(
            sides("work").ROWS["large"].work, num_envs=16, horizon=128, num_minibatches=8, update_epochs=4,
            warm_up=8, iterations=2,
        )  # fmt: skip
        assert trainer.run(work, seed=1, threads=1)["return"] > 60


@pytest.mark.slow
def test_a_row_is_measured_and_written(tmp_path: Path) -> None:
    command = ["--rows", "framework", "--repeats", "1", "--iterations", "1", "--threads", "1"]
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "speed.py"), *command, "--out", str(tmp_path)],
        check=True,
        timeout=280,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    row = json.loads((tmp_path / "speed.json").read_text())["framework"]
    ours, bare = row["sides"]["puffer_lightning"], row["sides"]["bare loop"]
    # The two do the same work to the same end, or the benchmark stops.
    assert ours["runs"][0]["return"] == pytest.approx(bare["runs"][0]["return"])
    assert bare["ratio"] == pytest.approx(ours["median"] / bare["median"])
    assert 0 < ours["median"] < row["floor"]["sps"]
    assert row["profile"]["update"] < row["profile"]["iteration"]
    assert (tmp_path / "speed.png").stat().st_size > 0
    assert "| **framework** | puffer_lightning |" in (tmp_path / "speed.md").read_text()
