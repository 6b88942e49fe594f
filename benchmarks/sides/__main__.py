"""One run of one side, in a process of its own: ``python -m sides SIDE REQUEST``.

The request is JSON: ``row``, ``seed``, ``threads`` (null to find out which are faster) and ``iterations``
(null for as many as the row says); the last two do not count where a task is to be solved. The result is the
last line.
"""

import importlib
import json
import sys
import warnings
from dataclasses import replace

from sides.work import ROWS

SIDES = {
    "puffer_lightning": ("ours", "run"),
    "not compiled": ("ours", "run_eager"),
    "CleanRL": ("cleanrl", "run"),
    "Stable-Baselines3": ("sb3", "run"),
    "PufferLib 3.0": ("puffer_trainer", "run"),
    "PufferLib's loop": ("pufferlib", "run"),
    "in turn": ("ours", "run_with_bare_loop"),
    "floor": ("floor", "run"),
    "profile": ("ours", "profile"),
}


def main(side: str, request: str) -> None:
    warnings.filterwarnings("ignore")
    asked = json.loads(request)
    row = ROWS[asked["row"]]
    module, function = SIDES[side]
    loaded = importlib.import_module(f"sides.{module}")
    if row.solve:
        result = loaded.solve(asked["seed"])
    else:
        work = row.work
        if asked["iterations"]:
            fewer = {name: min(getattr(work, name), asked["iterations"]) for name in ("warm_up", "probes")}
            work = replace(work, iterations=asked["iterations"], **fewer)
        result = getattr(loaded, function)(work, asked["seed"], asked["threads"])
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
