"""One GPU, read through NVML. On a simulated node the same pynvml loads the simulated ``libnvidia-ml.so.1``.

Calls block (some for milliseconds, when the driver is busy), so the runtime makes them in a thread. NVML is
thread-safe; the handle is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import pynvml

from vgpu.errors import ErrorCode, VgpuError

SM_COUNT_UNKNOWN: Final = 0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change while a GPU is there. ``sm_count`` 0: not told by this driver."""

    index: int
    uuid: str
    name: str
    total_memory_bytes: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """``by_pid``: bytes the driver holds for each process on this GPU, in any kind of context.

    A process whose figure the driver does not tell is there with 0: it exists, which is what a reaper asks.
    """

    used_bytes: int
    by_pid: dict[int, int]


@dataclass(frozen=True, slots=True)
class Activity:
    """The whole card, whoever uses it; None: this driver or card does not tell. The ratios are of NVML's own last
    sample, which covers between 1/6 and 1 s."""

    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None


class NvmlGpu:
    """The GPU with this NVML index or UUID. Context manager: NVML is shut down at its end.

    Errors: ``VgpuError`` (unavailable) with NVML's reason.
    """

    def __init__(self, gpu: int | str) -> None:
        self._gpu = gpu

    def __enter__(self) -> Self:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"NVML does not start: {error}", "see: vgpuctl doctor") from error
        try:
            if isinstance(self._gpu, int):
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(self._gpu)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._gpu)
            self.facts = self._read_facts()
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise VgpuError(ErrorCode.NOT_FOUND, f"NVML knows no GPU {self._gpu}: {error}", "nvidia-smi -L") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pynvml.nvmlShutdown()

    def _read_facts(self) -> GpuFacts:
        return GpuFacts(
            index=int(pynvml.nvmlDeviceGetIndex(self._handle)),
            uuid=str(pynvml.nvmlDeviceGetUUID(self._handle)),
            name=str(pynvml.nvmlDeviceGetName(self._handle)),
            total_memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total),
            sm_count=self._sm_count(),
        )

    def _sm_count(self) -> int:
        """SMs of the card: NVML counts CUDA cores, and the architecture says how many one SM has."""
        try:
            cores = int(pynvml.nvmlDeviceGetNumGpuCores(self._handle))
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(self._handle)
        except pynvml.NVMLError:
            return SM_COUNT_UNKNOWN
        return cores // cores_per_sm(int(capability[0]), int(capability[1]))

    def memory_use(self) -> MemoryUse:
        """Who holds how much now. Errors: ``VgpuError`` (unavailable), for one reading or for good (GPU lost)."""
        by_pid: dict[int, int] = {}
        try:
            used = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            # An MPS process is shown in a list of its own on some drivers, as an ordinary one on others.
            for read in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
                pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
            ):
                for process in self._listed(read):
                    known = by_pid.get(process.pid, 0)
                    by_pid[process.pid] = max(known, int(process.usedGpuMemory or 0))
        except pynvml.NVMLError as error:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"NVML gives no memory reading: {error}") from error
        return MemoryUse(used, by_pid)

    def activity(self) -> Activity:
        """How busy, hot and fast the card is. Never fails: what is not told is None."""
        rates = self._told(pynvml.nvmlDeviceGetUtilizationRates)
        power_mw = self._told(pynvml.nvmlDeviceGetPowerUsage)
        temperature = self._told(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        clock = self._told(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return Activity(
            utilization_ratio=None if rates is None else int(rates.gpu) / 100,
            memory_utilization_ratio=None if rates is None else int(rates.memory) / 100,
            power_w=None if power_mw is None else int(power_mw) / 1000,
            temperature_c=None if temperature is None else float(temperature),
            sm_clock_mhz=None if clock is None else float(clock),
        )

    def _told(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(self._handle, *arguments)
        except pynvml.NVMLError:
            return None

    def _listed(self, read: Callable[[Any], Iterable[Any]]) -> list[Any]:
        try:
            return list(read(self._handle))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            return []


def cores_per_sm(major: int, minor: int) -> int:
    """CUDA cores of one SM by compute capability (CUDA C++ Programming Guide, table of technical specifications)."""
    if major in {6, 7, 8, 9}:
        return 64 if (major, minor) in {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)} else 128
    return 128
