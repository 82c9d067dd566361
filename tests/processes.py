"""Processes that a test starts end with it, whatever it finds out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """``with Popen(...) as process, ended(process):``, for leaving ``Popen`` alone waits for one that goes on."""
    try:
        yield
    finally:
        process.kill()
