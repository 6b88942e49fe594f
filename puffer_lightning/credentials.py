"""Keys and passwords, which no file of a run may hold."""

import re
from collections.abc import Iterator
from typing import Any

from puffer_lightning.errors import ConfigurationError

_NAME = re.compile(r"(?:^|_)(?:api_?key|password|secret|token)$", re.IGNORECASE)


def refuse_credentials(options: Any) -> None:
    """Refuse options that hold a key or password: they are saved with the run and sent to its loggers.

    Args:
        options: Nested dicts and lists.

    Raises:
        ConfigurationError: It names the option, and not its value.
    """
    if found := next(_named_like_one(options, ""), None):
        raise ConfigurationError(
            f"{found} would be saved in config.yaml: leave it out and set an environment variable instead, "
            "such as WANDB_API_KEY."
        )


def _named_like_one(options: Any, path: str) -> Iterator[str]:
    entries = options.items() if isinstance(options, dict) else enumerate(options)
    for name, value in entries:
        if isinstance(value, dict | list):
            yield from _named_like_one(value, f"{path}{name}.")
        elif isinstance(value, str) and _NAME.search(str(name)):
            yield f"{path}{name}"
