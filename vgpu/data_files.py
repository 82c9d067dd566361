"""Files for the machine that come with the package: units, the example of a configuration, rules, dashboards.

A checkout has them under ``deploy/``. A wheel puts them below ``share/st-vgpu`` of the place where it is installed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from vgpu.errors import ErrorCode, VgpuError

CHECKOUT = Path(__file__).parents[1] / "deploy"


def shipped(name: str) -> Path:
    """The file at ``name`` (``systemd/vgpu.service``). ``VgpuError`` (not found) where this installation lacks it."""
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    shared = [Path(sysconfig.get_path("data", scheme)) / "share" / "st-vgpu" for scheme in schemes]
    for folder in (CHECKOUT, *shared, Path(sys.prefix) / "share" / "st-vgpu"):
        if (folder / name).is_file():
            return folder / name
    raise VgpuError(ErrorCode.NOT_FOUND, f"this installation has no {name}", "it is in the repository, under deploy/")
