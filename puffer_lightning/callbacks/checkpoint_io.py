"""How checkpoints are written and read: files at one stroke, and folders with a part from each rank."""

import re
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from typing_extensions import override

from puffer_lightning import files
from puffer_lightning.distributed import check_folder, folder_defect
from puffer_lightning.errors import ConfigurationError


class WholeFileIO(TorchCheckpointIO):
    """Replaces a local file at one stroke, checks it, and reads a sharded policy's folder like a file.

    Lightning's own neither waits for the disk nor notices a changed byte, and moves a file there from the
    temporary folder, which copies it if that is on another disk. Works as a plugin of Fabric's, too.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            files.write(Path(path), checkpoint)

    @override
    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        if "://" in str(path):
            options["weights_only"] = True
            loaded: dict[str, Any] = super().load_checkpoint(path, *arguments[:1], **options)
        else:
            loaded = read_sharded(path) if is_sharded(path) else files.load(Path(path))
        return loaded


def defect(path: str | Path) -> str | None:
    """What is wrong with a checkpoint, be it a file or a folder; None if it is whole and unchanged."""
    return folder_defect(Path(path)) if Path(path).is_dir() else files.defect(Path(path))


def check_checkpoint(path: str | Path) -> None:
    """Refuse a checkpoint that is not whole or could run code, and what is none.

    Args:
        path: A file or a folder.

    Raises:
        ConfigurationError: It names what is wrong.
    """
    path = Path(path)
    if path.is_dir():
        check_folder(path)
        return
    loaded = files.load(path, mmap=True)
    if not isinstance(loaded, dict) or "pytorch-lightning_version" not in loaded:
        raise files.not_whole(path, "it holds something else")


def is_sharded(path: str | Path) -> bool:
    """Whether a checkpoint is a folder to which each rank has written its part."""
    return (Path(path) / _METADATA_FILENAME).is_file()


def read_sharded(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a folder, as if one rank had written it to a file; it has to fit in memory.

    Raises:
        ConfigurationError: It is not whole, or could run code.
    """
    check_folder(Path(path))
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
    files.write(Path(file), read_sharded(folder))
