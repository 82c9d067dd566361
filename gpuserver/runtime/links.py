"""How the link to another process fails."""

from __future__ import annotations

import trio
from pydantic import ValidationError

from vgpu.errors import VgpuError

LinkErrors = (OSError, VgpuError, ValidationError, trio.ClosedResourceError, trio.BrokenResourceError)
"""Each of these errors ends one link, and the GPU Server serves its other links on."""
