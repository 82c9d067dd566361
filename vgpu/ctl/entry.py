"""``vgpuctl`` until it is isolated: a ``json.py`` or an older pydantic on PYTHONPATH is not imported.

``vgpuctl --help`` and ``vgpuctl COMMAND --help`` end here. Their texts are files, because typer takes 100 ms or more to
make one. ``tests/ctl/references.py`` writes the files.
"""

from __future__ import annotations

import os
import sys

from client_hook import interpreter

HELP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "help")  # noqa: PTH100, PTH118, PTH120
NEEDED_COLUMNS = 80
"""A wider terminal gets the same text."""


def main() -> int:
    if not interpreter.is_isolated():
        words = sys.argv[1:]
        asked = not words or words[-1] in ("-h", "--help")
        if asked and _has_shown(page(words[:-1])):
            return 0
        interpreter.become("vgpu.ctl", *words)
    if sys.argv[1:2] in (["slurm"], ["container"]):
        from vgpu.ctl.integrations import quick

        code = quick.main(sys.argv[1:])
        if code is not None:
            return code
    from vgpu.ctl.main import main as isolated

    return isolated()


def page(command: list[str]) -> str:
    """The file with the help of ``command``, such as ``["gpu", "set"]``; it need not exist. A word that is no command's
    names no file elsewhere."""
    words = ["vgpuctl", *command]
    name = "-".join(words) if all(word.replace("-", "").isalpha() for word in words) else ""
    return os.path.join(HELP, f"{name}.txt")  # noqa: PTH118


def _has_shown(path: str) -> bool:
    """False leaves the answer, or the error, to the isolated process."""
    if "_VGPUCTL_COMPLETE" in os.environ or _columns() < NEEDED_COLUMNS:
        return False
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            text = file.read()
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # no such file; closed, full, of another encoding
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
