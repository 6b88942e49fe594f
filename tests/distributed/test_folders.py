"""Checkpoints with a part from each of two ranks."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save

from puffer_lightning.distributed import check_folder, finish_folder, folder_defect
from puffer_lightning.errors import ConfigurationError
from tests.distributed.processes import run_ranks
from tests.test_files import Code


def write(rank: int, folder: Path, value: Any, failing: int | None = None) -> str:
    """What finishing a folder fails with on this rank; ``failing`` has failed before."""
    partial = folder / "last.ckpt.partial"
    save({"weights": torch.arange(8.0) + rank, f"of {rank}": value}, checkpoint_id=partial)
    if rank == 0:
        torch.save({"counted": 3}, partial / "meta.pt")
    try:
        finish_folder(partial, folder / "last.ckpt", "no space" if rank == failing else None)
    except OSError as problem:
        return str(problem)
    return ""


def write_code(rank: int, folder: Path) -> str:
    return write(rank, folder, Code(f"touch {folder}/last.ckpt/ran"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for learning_rate in (0.1, 0.2):
        assert run_ranks(write, folder, {"lr": learning_rate}) == ["", ""]
    return folder / "last.ckpt"


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy.ckpt")
    return tmp_path / "copy.ckpt"


def test_a_folder_replaces_another_and_is_whole(written: Path) -> None:
    assert [path.name for path in written.parent.iterdir()] == ["last.ckpt"]
    assert folder_defect(written) is None
    check_folder(written)
    checksums = json.loads((written / "checksums.json").read_text())
    assert checksums.keys() == {path.name for path in written.iterdir()} - {"checksums.json"}
    assert {"__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata"} <= checksums.keys()


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_rank_fails_all_do_and_the_folder_before_remains(tmp_path: Path, failing: int) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "before").touch()
    assert run_ranks(write, tmp_path, 1, failing) == ["no space", "no space"]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "before").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "checksums.json"])
def test_a_changed_byte_of_any_part_is_seen(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    assert folder_defect(copy)
    with pytest.raises(ConfigurationError, match=r"copy\.ckpt is not a checkpoint, or not a whole one"):
        check_folder(copy)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_missing_part_is_seen(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert name in str(folder_defect(copy))


class TestExecutable:
    """In folders without checksums, which whoever adds code can write, too."""

    @pytest.fixture
    def unsealed(self, copy: Path) -> Path:
        (copy / "checksums.json").unlink()
        check_folder(copy)
        return copy

    def test_in_the_description(self, unsealed: Path) -> None:
        (unsealed / ".metadata").write_bytes(pickle.dumps(Code(f"touch {unsealed}/ran")))
        self.assert_refused(unsealed, r"\w+\.system")

    def test_in_the_description_by_way_of_what_is_allowed(self, unsealed: Path) -> None:
        # STACK_GLOBAL follows dots: torch.serialization's os.
        reach = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93."
        (unsealed / ".metadata").write_bytes(reach)
        self.assert_refused(unsealed, r"torch\.serialization\.os\.system")

    def test_in_what_is_not_divided(self, unsealed: Path) -> None:
        torch.save({"counted": Code(f"touch {unsealed}/ran")}, unsealed / "meta.pt")
        self.assert_refused(unsealed, r"\w+\.system")

    def test_in_a_part(self, tmp_path: Path) -> None:
        assert run_ranks(write_code, tmp_path) == ["", ""]
        self.assert_refused(tmp_path / "last.ckpt", r"\w+\.system")

    def assert_refused(self, folder: Path, what: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"holds {what}, which could run code"):
            check_folder(folder)
        assert not (folder / "ran").exists()
