"""``vgpuctl`` until it is isolated: a ``json.py`` or an older pydantic on PYTHONPATH is not imported."""

from __future__ import annotations

import sys

from client_hook import interpreter


def main() -> int:
    if not interpreter.is_isolated():
        interpreter.become("vgpu.ctl", *sys.argv[1:])
    from vgpu.ctl.main import main as isolated

    return isolated()
