import json
from pathlib import Path
from typing import Any

import pytest

from puffer_lightning import scaling
from puffer_lightning.cli import main
from tests.commandline import refused

# Of a run of 1 process and of 2 with as many, and with half as many, environments each.
SPS = {
    ("weak", 1): [100.0, 80.0, 90.0],
    ("weak", 2): [150.0, 152.0, 180.0],
    ("strong", 2): [110.0, 100.0, 90.0],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The runs as they are made, without making them."""
    made: list[tuple[str, int, int]] = []

    def run(row: scaling.Row, *_: Any) -> float:
        made.append((row.mode, row.devices, row.num_envs))
        speeds = SPS[("weak", 1) if row.devices == 1 else (row.mode, row.devices)]
        return speeds[len(row.sps)]

    monkeypatch.setattr(scaling, "_steps_per_second", run)
    monkeypatch.setattr(scaling, "_data_options", lambda fit: {"num_envs": 8, "horizon": 16})
    return made


def test_sizes_take_turns_and_are_compared_within_each(turns: list[tuple[str, int, int]]) -> None:
    main(["scaling", "--devices", "2", "1", "--mode=both", "--out=there"])
    assert turns == [("weak", 1, 8), ("weak", 2, 8), ("strong", 1, 8), ("strong", 2, 4)] * 3
    report = json.loads(Path("there/scaling.json").read_text())
    assert [(row["mode"], row["devices"], row["sps"]) for row in report["rows"]][1] == (
        "weak",
        2,
        SPS["weak", 2],
    )
    # The medians of 1.5, 1.9 and 2, and of 1.1, 1.25 and 1, for twice as many processes.
    assert [row["efficiency"] for row in report["rows"]] == [1.0, 0.95, 1.0, pytest.approx(0.55)]
    assert report["command"] == "python -m puffer_lightning scaling --devices 2 1 --mode=both --out=there"
    assert {"processors", "torch", "lightning"} <= report["machine"].keys()
    assert "| weak | 2 | 8 | 150, 152, 180 | 152 | 0.95 |" in Path("there/scaling.md").read_text()
    assert Path("there/scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--devices 2", "--devices [2] leaves nothing to compare: give two numbers, as in 1 2"),
        ("--devices 0 1", "--devices [0, 1] leaves nothing to compare"),
        ("--devices x", "scaling: argument --devices: invalid int value: 'x'"),
        ("--iterations 0", "--iterations is 0: set it to 1 or more"),
        ("--repeats 0", "--repeats is 0: set it to 1 or more"),
        ("--mode sideways", "scaling: argument --mode: invalid choice: 'sideways'"),
        (
            "--devices 1 3 --mode strong",
            "data.num_envs 8 cannot be divided among 3 processes, as --mode strong",
        ),
    ],
)
def test_refuses(args: str, message: str, turns: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "scaling", *args.split())
    assert not turns


def test_what_the_configuration_lacks_is_said_by_fit(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "scaling", "--model.gama=1")
    assert message == "error: there is no option --model.gama: did you mean --model.gamma?"


def test_drawing_needs_an_extra(
    turns: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "find_spec", lambda name: None)
    assert 'pip install "puffer-lightning[plot]"' in refused(capsys, "scaling")


@pytest.mark.slow
def test_measures_real_processes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data.num_envs=8", "--data.horizon=16", "--trainer.accelerator=cpu"]
    main(["scaling", "--devices", "1", "2", "--repeats=1", "--iterations=3", *small])
    one, two = json.loads(Path("scaling/scaling.json").read_text())["rows"]
    assert (one["devices"], two["devices"], one["num_envs"], two["num_envs"]) == (1, 2, 8, 8)
    assert one["sps"][0] > 0 < two["sps"][0]
    assert two["efficiency"] == pytest.approx(two["sps"][0] / one["sps"][0] / 2)
    assert "weak, 2 × 8 environments, run 1 of 1" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["scaling"]


def test_help_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], ["scaling", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(args)
        assert exit_.value.code == 0
        assert "Measure how the training speed grows" in " ".join(capsys.readouterr().out.split())
