import os
import random
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from puffer_lightning import files
from puffer_lightning.callbacks import Checkpoint
from puffer_lightning.callbacks.checkpoint import newest_last
from puffer_lightning.callbacks.checkpoint_io import WholeFileIO
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import trainer

VALUE = {"weights": torch.arange(4.0), "nested": {"counts": [1, 2.5, "three", None, True]}}


class Code:
    """What runs code when it is unpickled."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return os.system, self.arguments


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    files.write(path, VALUE)
    return path


def test_what_was_written_is_loaded(file: Path) -> None:
    assert files.defect(file) is None
    loaded = files.load(file)
    assert loaded["weights"].equal(VALUE["weights"])
    assert loaded["nested"] == VALUE["nested"]
    assert [path.name for path in file.parent.iterdir()] == ["last.ckpt"]


def test_every_changed_byte_is_seen(file: Path) -> None:
    data = file.read_bytes()
    for position, byte in enumerate(data):
        # The second makes any byte zero, such as the length of the checksum.
        for mask in (1, byte or 255):
            changed = bytearray(data)
            changed[position] ^= mask
            file.write_bytes(changed)
            assert files.defect(file), position


def test_every_missing_end_is_seen(file: Path) -> None:
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        assert files.defect(file), length
    with pytest.raises(ConfigurationError, match=r"last.ckpt is not a checkpoint, or not a whole one \("):
        files.load(file)


def test_files_of_before_there_were_checksums(tmp_path: Path) -> None:
    file = tmp_path / "old.ckpt"
    torch.save(VALUE, file)
    assert files.load(file)["weights"].equal(VALUE["weights"])
    data = bytearray(file.read_bytes())
    data[data.find(torch.arange(4.0).numpy().tobytes()) + 6] ^= 1
    file.write_bytes(data)
    assert "has changed" in str(files.defect(file))


@pytest.mark.parametrize(
    ("what", "named"),
    [("code", r"\w+\.system"), ("module", "torch.nn.modules.linear.Linear"), ("path", r"pathlib.*\.\w*Path")],
)
def test_nothing_that_could_run_code_is_loaded(what: str, named: str, tmp_path: Path) -> None:
    values = {"code": Code(f"touch {tmp_path}/ran"), "module": torch.nn.Linear(1, 1), "path": Path()}
    files.write(tmp_path / "bad.ckpt", {"value": values[what]})
    with pytest.raises(ConfigurationError, match=rf"holds {named}, which could run code when it is loaded"):
        files.load(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_file_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "part").touch()
    files.write(tmp_path / "last.ckpt", VALUE)
    assert files.defect(tmp_path / "last.ckpt") is None
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_kill_amid_the_replacing_leaves_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last.ckpt", "last.ckpt.partial"):
        (tmp_path / name).mkdir()
    rename, renamed = Path.rename, []

    def killed_at_the_second(path: Path, other: Path) -> None:
        renamed.append(path)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        rename(path, other)

    monkeypatch.setattr(Path, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        files.put_in_place(tmp_path / "last.ckpt.partial", tmp_path / "last.ckpt")
    assert {path.name for path in tmp_path.glob("last*.ckpt")} == {"last-previous.ckpt"}


def save_for_ever(folder: Path, first: int) -> None:
    weights = torch.zeros(200_000)
    for number in range(first, 10**9):
        name = "best.ckpt" if number % 3 == 0 else "last.ckpt"
        WholeFileIO().save_checkpoint({"number": number, "weights": weights}, folder / name)
        (folder / "saved").write_text(str(number))


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run = trainer(Checkpoint(str(tmp_path)), folder=tmp_path)
    rng, context, amid = random.Random(1), get_context("fork"), 0
    save_until_killed(context, tmp_path, 0, 0.2)
    for _ in range(100):
        save_until_killed(context, tmp_path, 1 + number_of(tmp_path), rng.uniform(0.005, 0.06))
        amid += any(tmp_path.glob("*.partial"))
        found = newest_last(run)
        assert found is not None
        assert files.load(found)["number"] >= number_of(tmp_path)
        assert all(files.defect(path) is None for path in tmp_path.glob("*.ckpt"))
    assert amid > 10, "few kills came amid the writing"
    files.write(tmp_path / "last.ckpt", VALUE)
    assert not list(tmp_path.glob("*.partial"))


def save_until_killed(context: Any, folder: Path, first: int, seconds: float) -> None:
    process = context.Process(target=save_for_ever, args=(folder, first))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()


def number_of(folder: Path) -> int:
    """Of the last save that is known to have returned."""
    return int((folder / "saved").read_text() or -1)
