"""Every mutation on every environment, as a Markdown table.

``python -m tests.learning.mutation_table [WORD]``; with a word, only the mutations with it in their name.
"""

import sys

import pytest
import torch
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import SANITY_ENVS
from tests.learning.mutations import MUTATIONS
from tests.learning.registry import Setting
from tests.learning.training import MODE_MATTERS, score

COLUMNS: list[Setting] = [
    *((env, AutoresetMode.NEXT_STEP) for env in SANITY_ENVS),
    *((env, AutoresetMode.SAME_STEP) for env in MODE_MATTERS),
]


def row(name: str, scores: list[float]) -> str:
    """A line of the table; bold where the score falls short of ``solved_at``."""
    cells = [
        f"{value:.2f}" if value >= SANITY_ENVS[env].solved_at else f"**{value:.2f}**"
        for (env, _), value in zip(COLUMNS, scores, strict=True)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main(word: str = "") -> None:
    """Print the table row by row."""
    torch.set_num_threads(1)
    names = [env.removeprefix("puffer/").removesuffix("-v0") for env, _ in COLUMNS]
    modes = ["" if mode is AutoresetMode.NEXT_STEP else " (same step)" for _, mode in COLUMNS]
    print("| mutation |", " | ".join(map("".join, zip(names, modes, strict=True))), "|")
    print("|---|" + "---|" * len(COLUMNS))
    print("| solved at |", " | ".join(f"{SANITY_ENVS[env].solved_at:.2f}" for env, _ in COLUMNS), "|")
    print(row("none", [score(*setting) for setting in COLUMNS]), flush=True)
    for mutation in (mutation for mutation in MUTATIONS if word in mutation.name):
        with pytest.MonkeyPatch.context() as patch:
            mutation.apply(patch)
            print(row(mutation.name, [score(*setting) for setting in COLUMNS]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
