from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer

from puffer_lightning.callbacks import Threads
from puffer_lightning.callbacks.threads import is_small
from puffer_lightning.policies import CNNPolicy, MLPPolicy
from tests.callbacks.runs import PPO, Break, data, trainer

FEATURES, ACTIONS = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)


class Witness(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.training = torch.get_num_threads()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.evaluation = torch.get_num_threads()


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def witnessed(folder: Path) -> Witness:
    witness = Witness()
    trainer(Threads(), witness, folder=folder, validate_every=1).fit(PPO(), datamodule=data(1))
    return witness


def test_a_small_network_gets_one_thread_and_the_rest_is_put_back(tmp_path: Path) -> None:
    witness = witnessed(tmp_path)
    assert (witness.training, witness.evaluation, torch.get_num_threads()) == (1, 1, 3)


def test_the_environment_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert witnessed(tmp_path).training == 3


def test_threads_are_put_back_after_an_exception(tmp_path: Path) -> None:
    stops = Break(0, RuntimeError("stop here"))
    with pytest.raises(RuntimeError, match="stop here"):
        trainer(Threads(), stops, folder=tmp_path).fit(PPO(), datamodule=data(1))
    assert torch.get_num_threads() == 3


def test_size_decides() -> None:
    small = MLPPolicy(FEATURES, ACTIONS)
    assert is_small(small, rows=1024)
    assert not is_small(small, rows=32768)
    assert not is_small(MLPPolicy(FEATURES, ACTIONS, hidden_sizes=(1024, 1024)), rows=1024)
    assert not is_small(
        CNNPolicy(spaces.Box(0, 255, (1, 16, 16), dtype="uint8"), ACTIONS, hidden_size=8), rows=16
    )
