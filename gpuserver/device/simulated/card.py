"""A GPU without hardware and without a driver: a ``Device`` over an engine of its own, in this process.

The caller drives ``engine``: it opens contexts, takes memory, submits kernels and advances the time. The simulated GPUs
of a node are other ones: they lie in files, and NVML reads them there (``vendors``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self
from uuid import NAMESPACE_URL, uuid5

from cython_ext.simengine import Engine
from gpuserver.device.base import Activity, GpuFacts, MemoryUse
from gpuserver.device.simulated.profiles import Profile
from vgpu.errors import ErrorCode, VgpuError


class SimulatedGpu:
    """The card of ``profile``. Context manager: it is closed at the end."""

    def __init__(self, profile: Profile, index: int = 0) -> None:
        self.engine = Engine(index=index, memory_bytes=profile.memory_bytes, sms=profile.sm_count)
        self.capabilities = profile.capabilities
        self.facts = GpuFacts(
            index=index,
            uuid=f"GPU-{uuid5(NAMESPACE_URL, f'{profile.name}/{index}')}",
            name=f"Simulated {profile.name}",
            total_memory_bytes=profile.memory_bytes,
            sm_count=profile.sm_count,
        )
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False

    def memory_use(self) -> MemoryUse:
        """As ``Device.memory_use``. ``VgpuError`` (unavailable): the card is closed."""
        if not self._open:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"{self.facts.name} is closed")
        by_pid: dict[int, int] = {}
        for pid, _, memory_bytes, *_ in self.engine.contexts().values():
            by_pid[pid] = by_pid.get(pid, 0) + memory_bytes
        return MemoryUse(self.engine.memory_used_bytes, by_pid)

    def activity(self) -> Activity:
        """As ``Device.activity``. Only the utilization is simulated."""
        return Activity(utilization_ratio=self.engine.utilisation_ratio) if self._open else Activity()
