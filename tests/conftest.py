"""Settings of the whole suite."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small networks are faster on one thread, and the suite shares the machine with its own processes."""
    torch.set_num_threads(1)
