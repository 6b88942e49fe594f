import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler

from puffer_lightning.callbacks import CommunicationMonitor
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, data, heard, trainer
from tests.distributed.processes import run_ranks

ITERATIONS = 4


class Profiler(PyTorchProfiler):
    def teardown(self, stage: str | None) -> None:
        """Nothing, as it was not used: Lightning's fails then."""


def fit(rank: int, folder: Path) -> tuple[dict[str, float], str]:
    logger = CSVLogger(folder, name="", version="")
    run = trainer(
        CommunicationMonitor(every_n_iterations=2), folder=folder, devices=2, strategy="ddp", logger=logger
    )
    with heard() as said:
        run.fit(PPO(update_epochs=2, num_minibatches=2), datamodule=data(2 * ITERATIONS))
    return {name: value.item() for name, value in run.callback_metrics.items()}, said.getvalue()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(fit, tmp_path_factory.mktemp("communication"))


def test_an_iteration_reduces_gradients_once_a_minibatch_and_little_else(of_ranks: list[Any]) -> None:
    metrics, _ = of_ranks[0]
    # Gradients of 2 × 2 minibatches; the moments of the advantages; the losses.
    assert metrics["communication/all_reduce_count"] == 2 * 2 + 2
    # Four sums over episodes; of each rank steps, two times, microbatches and what asked it to end.
    assert metrics["communication/all_gather_count"] == 1
    assert metrics["communication/all_gather_bytes"] == 2 * (4 + 5) * 8
    # Lightning's: whether a rank was told to end.
    assert metrics["communication/broadcast_count"] == 1
    assert "communication/other_count" not in metrics


def test_metrics_are_of_all_ranks_and_make_sense(of_ranks: list[Any]) -> None:
    one, other = ({n: v for n, v in m.items() if n.startswith("communication/")} for m, _ in of_ranks)
    assert one == other
    assert 0 < one["communication/exposed_share"] <= one["communication/share"] < 1
    assert one["communication/all_reduce_gb_per_s"] > 0


def test_the_summary_is_said_once(of_ranks: list[Any]) -> None:
    (_, one), (_, other) = of_ranks
    [(share, exposed, number)] = re.findall(
        r"Communication took (\d+)% of an iteration, (\d+)% with .* 6 all_reduce of .*mean of (\d+) it",
        one,
    )
    assert int(exposed) <= int(share)
    assert number == "2"
    assert "Communication took" not in other


def test_one_process_has_nothing_to_measure(tmp_path: Path) -> None:
    run = trainer(CommunicationMonitor(every_n_iterations=1), folder=tmp_path)
    with heard() as said:
        run.fit(PPO(), datamodule=data(2))
    assert "nothing to measure: there is one process" in said.getvalue()
    assert not [name for name in run.callback_metrics if name.startswith("communication/")]


def test_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every_n_iterations is 0: set it to 1 or more"):
        CommunicationMonitor(every_n_iterations=0)
    run = trainer(CommunicationMonitor(), folder=tmp_path, profiler=Profiler())
    with pytest.raises(ConfigurationError, match=r"set trainer\.profiler to null"):
        run.fit(PPO(), datamodule=data(1))
