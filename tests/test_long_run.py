"""``benchmarks/long_run.py`` in small: what 300 iterations leave behind, which should be nothing."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from puffer_lightning.engines import PPO


def long_run() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "long_run.py"
    spec = importlib.util.spec_from_file_location("long_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def growth(iterations: int) -> dict[str, float]:
    """Of what the process holds, between two fifths of a run and its end."""
    counts = long_run().run(iterations)
    assert counts[-1].iteration == iterations
    assert min(counts[-1].threads, counts[-1].descriptors, counts[-1].segments, counts[-1].objects) >= 1
    begin, end = counts[len(counts) * 2 // 5 - 1]._asdict(), counts[-1]._asdict()
    return {name: end[name] - begin[name] for name in begin}


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grown = growth(300)
    assert {grown[name] for name in ("threads", "descriptors", "segments")} == {0}
    # The counts themselves are among the objects; the evaluation leaves a few the first time.
    assert grown["objects"] < 30
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert len(lines) == 1 + 300 + 4, "a header, the iterations and the evaluations"


def test_something_left_behind_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step, kept = PPO.training_step, list[Any]()

    def leak(self: PPO, *arguments: Any) -> None:
        step(self, *arguments)
        kept.append((Path("leak").open("w"), [self]))  # noqa: SIM115

    monkeypatch.setattr(PPO, "training_step", leak)
    grown = growth(50)
    assert grown["descriptors"] == 30
    assert grown["objects"] >= 30
    for file, _ in kept:
        file.close()
