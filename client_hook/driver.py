"""Whether this machine has an NVIDIA driver, by what the driver puts into /proc and /dev."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MARKS: Final = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


def is_here(root: Path = Path("/")) -> bool:
    return any((root / mark).exists() for mark in _MARKS)


def command_for_a_node(root: Path = Path("/")) -> str:
    """What a person types for a node on this machine."""
    return "vgpuctl serve --detach" + ("" if is_here(root) else " --simulate 1")
