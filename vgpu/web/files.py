"""Where the page's own files are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
