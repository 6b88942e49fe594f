"""The table of ``speed.py``: as JSON, as Markdown and as a bar plot."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_PACKAGES = ("torch", "lightning", "gymnasium", "stable-baselines3", "ale-py", "numpy")
_COLORS = {
    "puffer_lightning": "#1f6f8b", "CleanRL": "#d98e4a", "Stable-Baselines3": "#8a8a8a",
    "PufferLib 3.0": "#7d3c98", "PufferLib's loop": "#b5546b", "bare loop": "#9bbf85",
    "not compiled": "#6fb3c9",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """When, where, with what and by which command a row is measured."""
    return {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "commit": _commit(),
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU ({_processor()})",
        "device": _gpu(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "command": _command(sys.argv[1:]),
    }


def _command(args: list[str]) -> str:
    """As anybody would type it: where PufferLib's Python is, is this machine's own affair."""
    typed = ["python", "benchmarks/speed.py"]
    for previous, arg in zip(["", *args], args, strict=False):
        path = previous == "--pufferlib"
        typed.append("PYTHON" if path else re.sub("^(--pufferlib=).*", r"\1PYTHON", arg))
    return shlex.join(typed)


def _commit() -> str:
    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../puffer_lightning")
    return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed.strip() else "")


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def write(table: dict[str, Any], folder: Path) -> None:
    """Write all three.

    Args:
        table: By row, as ``speed.measure`` returns them.
        folder: Where to.
    """
    (folder / "speed.json").write_text(json.dumps(table, indent=1) + "\n")
    (folder / "speed.md").write_text(_markdown(table))
    _plot(table, folder / "speed.png")


def _markdown(table: dict[str, Any]) -> str:
    lines = ["| row | side | median | ours / this | bar | threads | mean return | share of the floor |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in table.items():
        for number, (side, of) in enumerate(row["sides"].items()):
            runs = of["runs"]
            cells = (
                f"**{name}**" if not number else "",
                side,
                f"{of['median']:,.1f} s" if row["unit"] == "seconds" else f"{of['median']:,.0f} SPS",
                f"{of['ratio']:.2f}" if number else "",
                _bar(of),
                f"{runs[0]['threads']}",
                _returns(runs),
                f"{of['median'] / row['floor']['sps']:.0%}" if not number and "floor" in row else "",
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What each row is, and its floor:", ""]
    lines += [
        f"- **{name}**: {row['work']}.{_floor(row)}{_outside(row)}{_stand_in(row)}"
        for name, row in table.items()
    ]
    lines += ["", "Where the time of an iteration of ours goes (`PhaseProfiler`), in ms and as a share:", ""]
    lines += _profiles({name: row["profile"] for name, row in table.items() if "profile" in row})
    lines += ["", "Measured:", ""]
    for where in {json.dumps(row["where"]): row["where"] for row in table.values()}.values():
        names = [name for name, row in table.items() if row["where"] == where]
        versions = ", ".join(f"{package} {number}" for package, number in where["versions"].items())
        lines.append(
            f"- {', '.join(names)}: {where['date']}, commit {where['commit']}, {where['machine']}, "
            f"{where['device']}; {versions}; by `{where['command']}`."
        )
    return "\n".join([*lines, ""])


def _profiles(of: dict[str, dict[str, float]]) -> list[str]:
    if not of:
        return []
    lines = [f"| phase | {' | '.join(of)} |", f"|---{'|---' * len(of)}|"]
    for name in next(iter(of.values())):
        cells = [f"{times[name]:,.1f} ({times[name] / times['iteration']:.0%})" for times in of.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _bar(of: dict[str, Any]) -> str:
    if of["bar"] is None:
        return ""
    return f"≥ {of['bar']:g}: {'reached' if of['ratio'] >= of['bar'] else '**missed**'}"


def _returns(runs: list[dict[str, Any]]) -> str:
    """From the least to the most of the runs' returns; in how many steps, where it was until solved."""
    returns = sorted(run["return"] for run in runs if run["return"] is not None)
    if not returns:
        return "no episode ended"
    text = f"{returns[0]:,.0f} to {returns[-1]:,.0f}"
    if "steps" in runs[0]:
        steps = sorted(run["steps"] for run in runs)
        solved = sum(run["solved"] for run in runs)
        text += f" after {steps[0]:,} to {steps[-1]:,} steps; {solved} of {len(runs)} solved"
    return text


def _floor(row: dict[str, Any]) -> str:
    if "floor" not in row:
        return ""
    of = row["floor"]
    return (
        f" {of['flops'] / 1e3:,.0f} kFLOP a step, {of['arithmetic']:,.0f} steps/s at the rate of large "
        f"matrix products; the environments alone {of['environments']:,.0f} steps/s; one after the other "
        f"{of['sps']:,.0f} SPS ({of['threads']} threads)."
    )


def _outside(row: dict[str, Any]) -> str:
    if "bare loop" not in row["sides"]:
        return ""
    runs = row["sides"]["puffer_lightning"]["runs"]
    shares = sorted(run["outside"] for run in runs)
    return f" Of the Trainer's time {shares[len(shares) // 2]:.1%} is outside of rollout and update."


def _stand_in(row: dict[str, Any]) -> str:
    if "PufferLib's loop" not in row["sides"] or "PufferLib 3.0" in row["sides"]:
        return ""
    return " PufferLib 3.0 was not there (`--pufferlib`); the loop stands in for its trainer."


def _plot(table: dict[str, Any], path: Path) -> None:
    """Bars of each row, relative to the fastest in it."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.34 * sum(len(row["sides"]) for row in table.values())))
    y, ticks = 0.0, []
    for name, row in table.items():
        sides = row["sides"]
        power = -1 if row["unit"] == "seconds" else 1
        speeds = {side: of["median"] ** power for side, of in sides.items()}
        ticks.append((y + (len(sides) - 1) / 2, name))
        for side, speed in speeds.items():
            share = speed / max(speeds.values())
            axes.barh(y, share, height=0.8, color=_COLORS[side], label=side)
            of = sides[side]["median"]
            text = f"{of:,.1f} s" if row["unit"] == "seconds" else f"{of:,.0f}"
            axes.text(share + 0.01, y, text, va="center", fontsize=8)
            y += 1
        y += 0.6
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xticks([])
    axes.set_xlabel("speed, relative to the row's fastest (steps a second; seconds to solve)")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    plt.close(figure)
