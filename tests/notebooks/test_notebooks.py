"""Every notebook runs from top to bottom in a fresh kernel, and is committed with the outputs of its code."""

import os
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOUR = ROOT / "notebooks" / "tour.ipynb"

MAX_BYTES = 2_000_000

ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "OMP_NUM_THREADS": "1",
    "SDL_VIDEODRIVER": "dummy",
}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class _Kernel(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def _read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


@cache
def _execute(path: Path) -> NotebookNode:
    """The notebook with new outputs.

    Raises:
        CellExecutionError: A cell raised.
    """
    notebook = _read(path)
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=500,
            kernel_manager_class=_Kernel,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, **ENVIRONMENT})
    return notebook


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _shown(cell: NotebookNode) -> list[set[str]]:
    """MIME types of what a cell shows, besides what it prints."""
    return [set(output.data) for output in cell.outputs if output.output_type != "stream"]


def _printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_notebook
def test_notebook_runs_from_top_to_bottom_and_draws_plots(path: Path) -> None:
    cells = _code(_execute(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in types for cell in cells for types in _shown(cell))


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_notebook
def test_committed_outputs_are_those_of_the_code(path: Path) -> None:
    committed, executed = _read(path), _execute(path)
    assert [_shown(cell) for cell in _code(committed)] == [_shown(cell) for cell in _code(executed)]


@every_notebook
def test_committed_notebook_was_run_in_order_and_is_small(path: Path) -> None:
    cells = _code(_read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert path.stat().st_size < MAX_BYTES
    printed_elsewhere = [
        word for word in ("site-packages", str(ROOT), "Traceback") if word in path.read_text("utf-8")
    ]
    assert printed_elsewhere == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tour_solves_cartpole_and_fabric_gives_the_weights_of_the_trainer() -> None:
    printed = _printed(_execute(TOUR))
    score = re.search(r"mean return of 100 greedy episodes: ([\d.]+)", printed)
    assert score is not None
    assert float(score[1]) >= 475
    assert re.search(r"\d\d tensors, bit for bit the same: True", printed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tour_shows_the_trained_episode_as_an_animation() -> None:
    assert any("image/gif" in types for cell in _code(_execute(TOUR)) for types in _shown(cell))
