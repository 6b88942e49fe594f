"""How checkpoints are written and read: files at one stroke, and folders with a part from each rank."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from typing_extensions import override

from puffer_lightning.errors import ConfigurationError


class WholeFileIO(TorchCheckpointIO):
    """Replaces a local file at one stroke, and reads the folder of a sharded policy as if it were a file.

    Lightning's own moves a file there from the temporary folder, which copies it if that is on another disk.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        partial = Path(f"{path}.partial")
        super().save_checkpoint(checkpoint, partial, storage_options)
        partial.replace(path)

    @override
    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        if is_sharded(path):
            return read_sharded(path)
        loaded: dict[str, Any] = super().load_checkpoint(path, *arguments, **options)
        return loaded


def is_sharded(path: str | Path) -> bool:
    """Whether a checkpoint is a folder to which each rank has written its part."""
    return (Path(path) / _METADATA_FILENAME).is_file()


def read_sharded(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a folder, as if one rank had written it to a file; it has to fit in memory."""
    checkpoint = _load_distributed_checkpoint(Path(path))
    keys = sorted(key for key in checkpoint if re.fullmatch(r"optimizer_\d+", key))
    checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in keys]
    for optimizer in checkpoint["optimizer_states"]:
        # Parameters by name, where an optimizer counts them.
        names = [name for group in optimizer["param_groups"] for name in group["params"]]
        number = {name: position for position, name in enumerate(names)}
        optimizer["state"] = {number[name]: state for name, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [number[name] for name in group["params"]]
    return checkpoint


def consolidate(folder: str, file: str) -> None:
    """Write the checkpoint in a folder to one file, which any strategy loads.

    Args:
        folder: To which each rank has written its part.
        file: To write; it must not exist.

    Raises:
        ConfigurationError: The one is not such a folder, or the other exists.
    """
    if not is_sharded(folder):
        raise ConfigurationError(
            f"{folder} is not a checkpoint that is divided among ranks: give the path of a folder that fit "
            "wrote with save_distributed_checkpoint."
        )
    if Path(file).exists():
        raise ConfigurationError(f"{file} exists: give the path of a file to be made.")
    torch.save(read_sharded(folder), file)
