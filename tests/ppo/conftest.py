from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def forget_compiled() -> Iterator[None]:
    """Nothing that another test compiled is there, nor counted."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
