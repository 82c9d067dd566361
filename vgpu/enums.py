"""The choices of a specification. This module does not import pydantic, so that vgpuctl's options need not wait for
that import."""

from __future__ import annotations

from enum import StrEnum


class PriorityName(StrEnum):
    """Order among vGPUs that are entitled to run; it adds nothing to a share."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Oversubscribe(StrEnum):
    """How a vGPU may own more memory than its card has left."""

    SWAP = "swap"
    MANAGED = "managed"


class LeaseChoice(StrEnum):
    """Which leases a vGPU may have in temporal mode."""

    AUTO = "auto"
    """A shared one while it is light (``gpuserver/core/scheduler/kinds.py``), else an exclusive one."""
    EXCLUSIVE = "exclusive"
    """The GPU is its own while it holds one."""


class OnServerLoss(StrEnum):
    """What a gate does once the GPU Server has been silent for the grace period."""

    BLOCK = "block"
    ERROR = "error"
    RUN = "run"


class PlacementName(StrEnum):
    """Which GPU of a node a new vGPU gets: ``vgpu/placement/policies``."""

    SPREAD = "spread"
    PACK = "pack"
    FIT = "fit"
