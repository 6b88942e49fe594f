"""Checkpoints to which each rank has written its part: folders that are checked and cannot run code."""

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from puffer_lightning import files
from puffer_lightning.distributed.collectives import broadcast, gather

_DESCRIPTION = ".metadata"
_CHECKSUMS = "checksums.json"
_TORCH = "torch.distributed.checkpoint"
_ALLOWED = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    f"{_TORCH}.filesystem": {"_StorageInfo"},
    f"{_TORCH}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}


def finish_folder(partial: Path, path: Path, failure: str | None) -> None:
    """Add checksums to a folder, wait until it is on the disk and put it in place; all ranks must call it.

    Args:
        partial: To which all ranks have written.
        path: Where it belongs; what is there is replaced.
        failure: What kept this rank from writing its part.

    Raises:
        OSError: On all ranks, if one has failed; what was in place remains, and nothing else.
    """
    checksums: dict[str, str] = {}
    if failure is None:
        try:
            checksums = _finish_parts(partial)
        except OSError as problem:
            failure = str(problem)
    of_ranks = gather((checksums, failure))
    failure = next((said for _, said in of_ranks if said), None)
    if dist.get_rank() == 0:
        if failure is None:
            try:
                _write_checksums(partial, {name: of[name] for of, _ in of_ranks for name in of})
                files.put_in_place(partial, path)
            except OSError as problem:
                failure = str(problem)
        shutil.rmtree(partial, ignore_errors=True)
    if failure := broadcast(failure):
        raise OSError(failure)


def folder_defect(folder: Path) -> str | None:
    """What is wrong with a folder that :func:`finish_folder` has put in place; None if nothing is.

    One without checksums is taken to be whole if it has its description.
    """
    if not (folder / _DESCRIPTION).is_file():
        return f"{_DESCRIPTION} is missing"
    if not (folder / _CHECKSUMS).is_file():
        return None
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_text())
        found = _checksums([folder / name for name in checksums])
    except (OSError, ValueError) as problem:
        return str(problem)
    changed = [name for name, digest in checksums.items() if found[name] != digest]
    return f"{', '.join(changed)} in it has changed" if changed else None


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not whole, or that could run code.

    torch unpickles the description, and whatever is not a tensor, without asking what it is; Lightning adds a
    file of what is not divided.

    Raises:
        ConfigurationError: It names what is wrong.
    """
    if wrong := folder_defect(folder):
        raise files.not_whole(folder, wrong)
    with (folder / _DESCRIPTION).open("rb") as file:
        description = _Plain(file, folder).load()
    if not isinstance(description, Metadata):
        raise files.not_whole(folder, f"{_DESCRIPTION} is something else")
    for index, place in description.storage_data.items():
        if isinstance(description.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                files.load_part(io.BytesIO(file.read(place.length)), folder)
    for path in folder.glob("*.pt"):
        files.load(path, mmap=True)


class _Plain(pickle.Unpickler):
    """Knows the classes of a description and nothing else."""

    def __init__(self, file: Any, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in _ALLOWED.get(module_name, ()):
            raise files.executable(self._folder, f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def _finish_parts(folder: Path) -> dict[str, str]:
    """The checksums of what this rank has written, which is on the disk now."""
    rank = dist.get_rank()
    prefix = f"__{rank}_"
    parts = [path for path in folder.iterdir() if path.name.startswith(prefix)]
    if rank == 0:
        parts += [path for path in folder.iterdir() if not path.name.startswith("__")]
    for path in parts:
        files.sync(path)
    return _checksums(parts)


def _write_checksums(folder: Path, checksums: dict[str, str]) -> None:
    (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=1))
    files.sync(folder / _CHECKSUMS)
    files.sync(folder)


def _checksums(parts: list[Path]) -> dict[str, str]:
    digests = {}
    for path in parts:
        with path.open("rb") as file:
            digests[path.name] = files.checksum(file)
    return digests
