import ctypes
import subprocess
import sys

import pytest

from puffer_lightning import memory
from puffer_lightning.ppo import Learner, PPOConfig
from tests.transitions import ExactPolicy

# 32 MiB, eight times.
PROGRAM = """
import resource, torch
from puffer_lightning.memory import keep_freed_memory
torch.set_num_threads(1)
if {keep}:
    assert keep_freed_memory()
# Until what is freed lies side by side.
for _ in range(20):
    torch.zeros(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.zeros(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")


def page_faults(keep: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not is_glibc(), reason="the C library has no mallopt")
def test_freed_memory_is_not_asked_for_again() -> None:
    pages = 8 * 2**25 // 4096
    assert page_faults(keep=True) < pages // 100
    assert page_faults(keep=False) > pages // 2


@pytest.mark.skipif(not is_glibc(), reason="the C library has no mallopt")
@pytest.mark.parametrize("name", memory._SETTINGS)
def test_the_environment_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in memory._SETTINGS:
        monkeypatch.delenv(each, raising=False)
    assert memory.keep_freed_memory()
    monkeypatch.setenv(name, "1")
    assert not memory.keep_freed_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep_freed_memory()


def test_training_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("puffer_lightning.ppo.learner.keep_freed_memory", lambda: calls.append(True))
    Learner(ExactPolicy(), PPOConfig(), seed=0)
    assert calls == [True]
