"""Files that are there whole or not at all, show a changed byte, and cannot run code when loaded."""

import hashlib
import io
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from puffer_lightning.errors import ConfigurationError

PARTIAL = ".partial"
"""Ends the name of what is still being written."""

_CHUNK = 1 << 20
_ALGORITHM = "sha256"
_SEAL_LENGTH = len(_ALGORITHM) + 1 + 2 * hashlib.new(_ALGORITHM).digest_size
# The last record of a zip archive, without its comment, whose length are the last two bytes.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22


def write(path: Path, value: dict[str, Any]) -> None:
    """Save to a file that is replaced at one stroke, once all of it is on the disk.

    The file is what ``torch.save`` writes, a zip archive, with a checksum of all its bytes as the archive's
    comment. What an earlier process left half written in the folder is removed.

    Args:
        path: The file.
        value: What ``torch.save`` knows.

    Raises:
        OSError: It could not be written, because the disk is full for one; the file that was there remains.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"*.ckpt{PARTIAL}"):
        if left.is_file():
            left.unlink()
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(_sealed(buffer.getvalue()))
            file.flush()
            os.fsync(file.fileno())
        put_in_place(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def put_in_place(partial: Path, path: Path) -> None:
    """Give what is on the disk already, a file or a folder, the name of what it replaces.

    A folder cannot be replaced at one stroke: until the new one is there the old one goes by the name
    ``<stem>-previous.ckpt``.
    """
    if path.is_dir() or partial.is_dir():
        previous = path.with_name(f"{path.stem}-previous{path.suffix}")
        if path.exists():
            _remove(previous)
            path.rename(previous)
        partial.rename(path)
        sync(path.parent)
        _remove(previous)
    else:
        partial.replace(path)
    sync(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def defect(path: Path) -> str | None:
    """What is wrong with a file that ``write`` or ``torch.save`` wrote; None if it is whole and unchanged.

    Of a file without a checksum, which ``torch.save`` alone wrote, the archive's own are looked at: they
    cover what is stored, and not every byte.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _SEAL_LENGTH))
            tail = file.read()
            end = tail[-_END_LENGTH:]
            if end.startswith(_END_OF_ARCHIVE) and end.endswith(b"\0\0"):
                with zipfile.ZipFile(file) as archive:
                    damaged = archive.testzip()
                return f"{damaged} in it has changed" if damaged else None
            file.seek(0)
            seal = _seal(checksum(file, max(0, size - _SEAL_LENGTH)))
    except (OSError, zipfile.BadZipFile, EOFError) as problem:
        return str(problem)
    return None if tail == seal else "its end is missing, or a byte of it has changed"


def load(path: Path, mmap: bool = False) -> Any:
    """The tensors and plain values that were saved to a file, on the CPU.

    Args:
        path: The file.
        mmap: Read tensors when they are used.

    Raises:
        ConfigurationError: It is not whole, or holds anything else, which could run code.
    """
    if wrong := defect(path):
        raise not_whole(path, wrong)
    return load_part(path, path, mmap)


def load_part(source: Path | IO[bytes], path: Path, mmap: bool = False) -> Any:
    """As :func:`load`, from a part of a file that is known to be whole.

    Args:
        source: The part.
        path: What to call it in messages.
        mmap: As of :func:`load`.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as problem:
        culprit = re.search(r"GLOBAL (\S+)", str(problem))
        raise executable(path, culprit[1] if culprit else "more than that") from problem
    except (EOFError, RuntimeError) as problem:
        raise not_whole(path, "torch cannot read it") from problem


def executable(path: Path, what: str) -> ConfigurationError:
    """The refusal of a checkpoint that could run code."""
    return ConfigurationError(
        f"ckpt_path {path} should hold tensors and plain values and holds {what}, which could run code when "
        "it is loaded: give the path of one that fit wrote."
    )


def not_whole(path: Path, wrong: str) -> ConfigurationError:
    """The refusal of a checkpoint that is not what was written."""
    return ConfigurationError(
        f"ckpt_path {path} is not a checkpoint, or not a whole one ({wrong}): give the path of one that fit "
        "wrote."
    )


def checksum(file: IO[bytes], length: int | None = None) -> str:
    """SHA-256 of the next ``length`` bytes, or of all that follow."""
    digest, left = hashlib.new(_ALGORITHM), length
    while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
        digest.update(chunk)
        if left is not None:
            left -= len(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or which files there are in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sealed(archive: bytes) -> bytes:
    announced = archive[:-2] + struct.pack("<H", _SEAL_LENGTH)
    return announced + _seal(checksum(io.BytesIO(announced)))


def _seal(digest: str) -> bytes:
    return f"{_ALGORITHM}:{digest}".encode()
