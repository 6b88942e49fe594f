"""The configurations that come with the package, found by name from anywhere."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from puffer_lightning.errors import ConfigurationError


def find_configs(args: Sequence[str]) -> list[str]:
    """Replace the names of shipped configurations by their paths.

    ``--config NAME`` means the file NAME, relative to the working directory; if there is none, the one of
    that name that comes with the package.

    Args:
        args: A command line.

    Raises:
        ConfigurationError: There is neither, the message lists what is shipped; or it is not YAML.
    """
    found: list[str] = []
    for previous, arg in zip(["", *args], args, strict=False):
        option, equals, value = arg.partition("=")
        if previous in ("-c", "--config"):
            found.append(_find_config(arg))
        elif option in ("-c", "--config") and equals:
            found.append(f"{option}={_find_config(value)}")
        else:
            found.append(arg)
    return found


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package, in a wheel or in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _find_config(name: str) -> str:
    path = Path(name) if Path(name).is_file() else shipped_configs() / name
    if not path.is_file():
        names = ", ".join(sorted(path.name for path in shipped_configs().glob("*.yaml")))
        raise ConfigurationError(
            f"--config {name} is neither a file nor a shipped configuration; these are: {names}."
        )
    try:
        options, problem = yaml.safe_load(path.read_text(encoding="utf-8")), ""
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        options, problem = None, f" ({' '.join(str(error).split())})"
    if not isinstance(options, dict):
        raise ConfigurationError(f"--config {name} is not YAML of options and their values{problem}.")
    return str(path)
