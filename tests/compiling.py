"""What tests of ``torch.compile`` need."""

import shutil
import sys

import pytest

needs_compiler = pytest.mark.skipif(
    sys.platform == "win32" or not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler on the CPU",
)
