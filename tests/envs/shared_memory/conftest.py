from collections.abc import Callable, Iterator
from typing import Any

import pytest

from puffer_lightning.envs import SharedMemoryVectorEnv

Make = Callable[..., SharedMemoryVectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes environments, by default with fork as that is the fastest, and closes them."""
    made = []

    def make(*args: Any, context: str = "fork", **kwargs: Any) -> SharedMemoryVectorEnv:
        made.append(SharedMemoryVectorEnv(*args, context=context, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for env in made:
        env.close()
