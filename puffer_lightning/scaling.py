"""``scaling``: one configuration on several numbers of processes, and how much faster that is."""

import argparse
import csv
import datetime
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import yaml
from typing_extensions import override

from puffer_lightning.errors import ConfigurationError

# The first iterations of a run allocate, and start threads and connections.
_WARM_UP = 2
SUMMARY = "Measure how the training speed grows with the number of processes."
"""What it does, for the list of subcommands."""

_DETAILS = """
Each size is run with fit, in fresh processes of one thread each; sizes take turns. weak keeps
data.num_envs environments a process, strong divides them among the processes. Efficiency is the
speed over that of the smallest size, divided by how many times more processes there are: 1 is
perfect. Writes scaling.md, scaling.json and scaling.png. Options that are not listed are those of
fit, such as --model.gamma.
"""


@dataclass
class Row:
    """What the runs of one size gave.

    Attributes:
        mode: "weak" or "strong".
        devices: Processes.
        num_envs: Environments of each.
        sps: Environment steps per second of all processes together, the median of an iteration, of each run.
        efficiency: Median over runs of the speed-up over the smallest size's run of the same turn, divided by
            the ratio of the sizes.
    """

    mode: str
    devices: int
    num_envs: int
    sps: list[float]
    efficiency: float = 1.0


def add_options(parser: Any) -> None:
    """Describe the options to a parser, of ``argparse`` or one that works alike."""
    parser.description = SUMMARY + _DETAILS
    parser.add_argument("--config", type=str, default="ppo.yaml", help="Configuration to run.")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2], help="Numbers of processes, or of GPUs, to compare."
    )
    parser.add_argument(
        "--iterations", type=int, default=20, help="Iterations of each run that count, after two that do not."
    )
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each size.")
    parser.add_argument(
        "--mode", choices=["weak", "strong", "both"], default="weak", help="What to hold constant."
    )
    parser.add_argument("--out", type=str, default="scaling", help="Folder to write to.")


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"scaling: {message}")


def measure(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: Its command line, without ``scaling``.

    Raises:
        ConfigurationError: An option is out of its range, or does not fit the configuration.
    """
    parser = _Parser(prog="puffer_lightning scaling", allow_abbrev=False)
    add_options(parser)
    options, of_fit = parser.parse_known_args(list(args))
    for name in ("iterations", "repeats"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name} is {getattr(options, name)}: set it to 1 or more.")
    sizes = sorted(set(options.devices))
    if sizes[0] < 1 or len(sizes) < 2:
        raise ConfigurationError(f"--devices {sizes} leaves nothing to compare: give two numbers, as in 1 2.")
    if not find_spec("matplotlib"):
        raise ConfigurationError('scaling draws with a package: pip install "puffer-lightning[plot]".')
    fit = ["--config", options.config, *of_fit]
    data = _data_options(fit)
    modes = ["weak", "strong"] if options.mode == "both" else [options.mode]
    rows = [Row(mode, size, _num_envs(mode, size, data["num_envs"]), []) for mode in modes for size in sizes]
    for turn in range(options.repeats):
        for row in rows:
            row.sps.append(_steps_per_second(row, fit, data, options.iterations))
            print(
                f"{row.mode}, {row.devices} × {row.num_envs} environments, run {turn + 1} of "
                f"{options.repeats}: {row.sps[-1]:,.0f} SPS",
                flush=True,
            )
    _compare(rows)
    command = shlex.join(["python", "-m", "puffer_lightning", "scaling", *args])
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    _write(rows, command, folder)
    _draw(rows, options.config, folder / "scaling.png")
    print(f"Written to {folder}: scaling.md, scaling.json, scaling.png")


def _data_options(fit: list[str]) -> dict[str, Any]:
    """The options ``data`` of the configuration; what is wrong with it is said here, before anything runs."""
    done = subprocess.run(
        _command([*fit, "--print_config"]), capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        raise ConfigurationError(_reason(done.stderr))
    options: dict[str, Any] = yaml.safe_load(done.stdout)["data"]
    return options


def _reason(stderr: str) -> str:
    said = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return said[0][len("error: ") :] if said else stderr.strip()


def _num_envs(mode: str, size: int, num_envs: int) -> int:
    if mode == "weak":
        return num_envs
    if num_envs % size:
        raise ConfigurationError(
            f"data.num_envs {num_envs} cannot be divided among {size} processes, as --mode strong does: set "
            f"it to a multiple of {size}."
        )
    return num_envs // size


def _steps_per_second(row: Row, fit: list[str], data: dict[str, Any], iterations: int) -> float:
    steps = row.devices * row.num_envs * data["horizon"] * (_WARM_UP + iterations)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "trainer.devices": row.devices,
            "trainer.logger": "CSVLogger",
            "trainer.logger.save_dir": folder,
            "trainer.enable_checkpointing": "false",
            "trainer.enable_progress_bar": "false",
            "trainer.limit_val_batches": 0,
            "data.num_envs": row.num_envs,
            "data.total_timesteps": steps,
            **({"data.split_envs": "false"} if "split_envs" in data else {}),
        }
        command = _command([*fit, *(f"--{name}={value}" for name, value in settings.items())])
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        if done.returncode:
            raise ConfigurationError(
                f"fit does not run on {row.devices} processes with {row.num_envs} environments each: "
                + _reason(done.stderr)
            )
        [metrics] = Path(folder).rglob("metrics.csv")
        with metrics.open(encoding="utf-8") as file:
            sps = [float(line["time/sps"]) for line in csv.DictReader(file) if line["time/sps"]]
    return median(sps[_WARM_UP:])


def _command(fit: list[str]) -> list[str]:
    return [sys.executable, "-m", "puffer_lightning", "fit", *fit]


def _environment() -> dict[str, str]:
    # Threads of several processes would compete for the processors that a single one has to itself.
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _compare(rows: list[Row]) -> None:
    for row in rows:
        base = next(other for other in rows if other.mode == row.mode)
        ratios = [ours / theirs for ours, theirs in zip(row.sps, base.sps, strict=True)]
        row.efficiency = median(ratios) * base.devices / row.devices


def _write(rows: list[Row], command: str, folder: Path) -> None:
    machine = {
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("puffer-lightning", "torch", "lightning", "gymnasium")},
    }
    report = {
        "command": command,
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "machine": machine,
        "rows": [asdict(row) for row in rows],
    }
    (folder / "scaling.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    lines = [
        f"`{command}`, {report['date']}: {', '.join(f'{name} {value}' for name, value in machine.items())}.",
        "One thread a process; SPS are medians of an iteration, of all processes together.",
        "",
        "| mode | processes | environments of each | SPS of each run | median SPS | efficiency |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.mode} | {row.devices} | {row.num_envs} | {', '.join(f'{sps:,.0f}' for sps in row.sps)} "
            f"| {median(row.sps):,.0f} | {row.efficiency:.2f} |"
            for row in rows
        ),
    ]
    (folder / "scaling.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[3:]))


def _draw(rows: list[Row], title: str, path: Path) -> None:
    # Not at the top: it is an extra.
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        axes.plot([r.devices for r in of_mode], [r.efficiency for r in of_mode], marker="o", label=mode)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set(title=title, xlabel="processes", ylabel="efficiency", ylim=(0, None))
    axes.set_xticks(sorted({row.devices for row in rows}))
    axes.legend()
    figure.savefig(path, dpi=150)
