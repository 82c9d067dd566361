"""Servers and brokers stay prompt: no collection of garbage walks what they have imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import gpuserver.runtime.server
from vgpu.process_tuning import keep_all
before = len(gc.get_objects())
keep_all()
print(gc.isenabled(), len(gc.get_objects()) * 100 < before, gc.get_freeze_count() > before // 2)
"""


def test_what_is_imported_is_not_walked_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
