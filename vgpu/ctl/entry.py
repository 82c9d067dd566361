"""``vgpuctl`` until it is isolated: a ``json.py`` or an older pydantic on PYTHONPATH is not imported.

``vgpuctl --help`` ends here. Its text is a file, because typer takes 100 ms to make it. ``tests/ctl/references.py``
writes the file.
"""

from __future__ import annotations

import os
import sys

from client_hook import interpreter

OVERVIEW = os.path.join(os.path.dirname(os.path.abspath(__file__)), "overview.txt")  # noqa: PTH100, PTH118, PTH120
NEEDED_COLUMNS = 80
"""A wider terminal gets the same text."""


def main() -> int:
    if not interpreter.is_isolated():
        if sys.argv[1:] in ([], ["-h"], ["--help"]) and _has_shown_overview():
            return 0
        interpreter.become("vgpu.ctl", *sys.argv[1:])
    if sys.argv[1:2] == ["slurm"] and len(sys.argv) == 3 and not sys.argv[2].startswith("-"):  # jobs wait for it
        from vgpu.integrations.slurm import main as hook

        return hook(sys.argv[2:])
    from vgpu.ctl.main import main as isolated

    return isolated()


def _has_shown_overview() -> bool:
    """False leaves the answer, or the error, to the isolated process."""
    if "_VGPUCTL_COMPLETE" in os.environ or _columns() < NEEDED_COLUMNS:
        return False
    try:
        with open(OVERVIEW, encoding="utf-8") as file:  # noqa: PTH123
            text = file.read()
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # closed, full, of another encoding
        return False
    return True


def _columns() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or NEEDED_COLUMNS
    except OSError:
        return NEEDED_COLUMNS
