"""``get_logger``: structlog's, without the packages that structlog imports for coloured tracebacks.

structlog imports rich where rich is installed. That takes 130 ms and 7 MB in each process of a node, and none of them
draws a traceback: ``vgpu/logs.py`` configures structlog with one line per event.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """An import of ``module`` fails as if it was not installed, unless this process has imported it before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # what the import system documents for this
    try:
        yield
    finally:
        del sys.modules[module]


with _hidden("rich"):
    from structlog import get_logger

__all__ = ["get_logger"]
