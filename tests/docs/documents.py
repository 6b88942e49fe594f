"""The documents, and the blocks in them that are meant to run.

A fenced block runs if its info string says so: ``python run`` is executed, ``yaml run`` parsed as a
configuration, and ``python file=NAME`` is a file NAME in the folder that the document's other blocks run in.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(python|yaml) (run|file=(\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    document: Path
    line: int
    language: str
    file: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, fence.start(4)), fence[1], fence[3], fence[4])
        for fence in _FENCE.finditer(text)
    ]
