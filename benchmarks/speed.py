"""PPO by ``puffer_lightning`` and by others, on the same work, in one run.

    python benchmarks/speed.py --repeats 5 --rows small large

Every run is a process of its own, warmed up, timed over whole iterations (rollout and update), and
the sides of a row take turns; those of *framework* by iterations of one process. Each side has the number of
threads, one or two, that it is faster with, found in its first run. The table gives medians, and of ratios
the median of those within a turn: only ratios mean anything on a busy machine. A last run of ours tells where
its time goes. ``sides/work.py`` says what the rows are, and ``sides/`` holds the sides. PufferLib's own
trainer takes part where ``--pufferlib`` names the Python of an environment that has it, and torch; else a
loop of its update stands in for it.

Writes ``speed.json``, ``speed.md`` and ``speed.png`` to ``--out``; rows that are not measured stay as they
are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sides.report import machine, write
from sides.work import ROWS, Row

OURS, PUFFERLIB = "puffer_lightning", "PufferLib 3.0"
HERE = Path(__file__).resolve().parent


def run_side(side: str, request: dict[str, Any], python: str | Path = sys.executable) -> dict[str, Any]:
    """One run, in a process and a folder of its own.

    Args:
        side: By name.
        request: As ``sides.__main__`` takes it.
        python: The interpreter that has what the side imports.

    Raises:
        SystemExit: It failed; its last words are told.
    """
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", "sides", side, json.dumps(request)]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed on {request}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(name: str, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """All sides of a row in turn."""
    if options.pufferlib is None:
        row = row.without_pufferlib()
    fixed = options.threads or (1 if row.in_turn else None)
    sides = [OURS, *row.peers]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}

    def run(side: str, seed: int, threads: int | None = None) -> dict[str, Any]:
        asked = {"row": name, "seed": seed, "threads": threads or fixed, "iterations": options.iterations}
        return run_side(side, asked, options.pufferlib if side == PUFFERLIB else sys.executable)

    for repeat in range(options.repeats):
        if row.in_turn:
            results = run("in turn", repeat + 1).items()
        else:
            # Each side goes first in turn, and is told of when it is done.
            at = repeat % len(sides)
            results = (
                (side, run(side, repeat + 1, runs[side][0]["threads"] if runs[side] else None))
                for side in sides[at:] + sides[:at]
            )
        for side, result in results:
            runs[side].append(result)
            print(f"{name:14} {side:20} " + _words(result), flush=True)
    key = "seconds" if row.solve else "sps"
    measured: dict[str, Any] = {"where": machine(), "work": row.work.describe(), "unit": key, "sides": {}}
    for side, results in runs.items():
        ratios = [
            other[key] / own[key] if row.solve else own[key] / other[key]
            for own, other in zip(runs[OURS], results, strict=True)
        ]
        measured["sides"][side] = {
            "median": statistics.median(result[key] for result in results),
            "ratio": statistics.median(ratios),
            "bar": row.peers.get(side),
            "runs": results,
        }
    if not row.solve:
        threads = runs[OURS][0]["threads"]
        measured |= {kind: run(kind, options.repeats, threads) for kind in ("floor", "profile")}
    return measured


def _words(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
    )


def _interpreter(path: str) -> Path:
    # Not resolved: an environment's Python is a link to another.
    return Path(path).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, help="timed in each run, instead of the row's own number")
    parser.add_argument("--threads", type=int, help="of all sides, instead of the faster of one and two")
    parser.add_argument(
        "--pufferlib", type=_interpreter, metavar="PYTHON", help="that of an environment with PufferLib 3.0"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "speed.json"
    table = json.loads(file.read_text()) if file.exists() else {}
    for name in options.rows:
        table[name] = measure(name, ROWS[name], options)
        table = {known: table[known] for known in ROWS if known in table}
        # After each row, so that nothing is lost if the next one fails.
        write(table, options.out)


if __name__ == "__main__":
    main()
