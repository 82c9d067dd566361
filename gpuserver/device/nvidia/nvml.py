"""One GPU, read through NVML. On a simulated node the same pynvml loads the simulated ``libnvidia-ml.so.1``.

Calls block (some for milliseconds, when the driver is busy), so the runtime makes them in a thread. NVML is
thread-safe; the handle is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self

import pynvml

from gpuserver.device.base import SM_COUNT_UNKNOWN, Activity, Capabilities, GpuFacts, MemoryUse
from vgpu.errors import ErrorCode, VgpuError

CHECKPOINT_DRIVER: Final = 570
"""The first driver with the checkpoint calls."""
PREEMPTION: Final = (6, 0)
"""The first compute capability whose kernels the GPU can interrupt (Pascal)."""
PARTITIONS: Final = (7, 0)
"""The first compute capability at which MPS limits a process to a part of the SMs (Volta)."""
NUMA_WORDS: Final = 1
"""Of 64 nodes each, in which NVML names those of the host's memory."""


class NvmlGpu:
    """The ``Device`` with this NVML index or UUID. Context manager: it starts NVML, and shuts NVML down at its end.

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
            self.capabilities = capabilities_of(self._compute_capability(), self._driver())
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
            numa_node=self._numa_node(),
        )

    def _numa_node(self) -> int | None:
        """Of the host's memory next to the GPU: the first, where the driver names several."""
        words = self._reported(pynvml.nvmlDeviceGetMemoryAffinity, NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE) or ()
        mask = sum(int(word) << (64 * i) for i, word in enumerate(words))
        return (mask & -mask).bit_length() - 1 if mask else None

    def _sm_count(self) -> int:
        """The SMs of the GPU. NVML counts CUDA cores; the compute capability gives the number of cores of one SM."""
        cores, capability = self._reported(pynvml.nvmlDeviceGetNumGpuCores), self._compute_capability()
        return SM_COUNT_UNKNOWN if cores is None or capability is None else int(cores) // cores_per_sm(*capability)

    def _compute_capability(self) -> tuple[int, int] | None:
        found = self._reported(pynvml.nvmlDeviceGetCudaComputeCapability)
        return None if found is None else (int(found[0]), int(found[1]))

    @staticmethod
    def _driver() -> int:
        """The driver's branch, for example 580. 0: it is not known."""
        try:
            return int(str(pynvml.nvmlSystemGetDriverVersion()).partition(".")[0])
        except (pynvml.NVMLError, ValueError):
            return 0

    def memory_use(self) -> MemoryUse:
        """As ``Device.memory_use``. ``VgpuError`` (unavailable) has NVML's reason."""
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
        """As ``Device.activity``. NVML's own sample covers between 1/6 and 1 s."""
        rates = self._reported(pynvml.nvmlDeviceGetUtilizationRates)
        power_mw = self._reported(pynvml.nvmlDeviceGetPowerUsage)
        temperature = self._reported(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        clock = self._reported(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return Activity(
            utilization_ratio=None if rates is None else int(rates.gpu) / 100,
            memory_utilization_ratio=None if rates is None else int(rates.memory) / 100,
            power_w=None if power_mw is None else int(power_mw) / 1000,
            temperature_c=None if temperature is None else float(temperature),
            sm_clock_mhz=None if clock is None else float(clock),
        )

    def _reported(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(self._handle, *arguments)
        except pynvml.NVMLError:
            return None

    def _listed(self, read: Callable[[Any], Iterable[Any]]) -> list[Any]:
        try:
            return list(read(self._handle))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            return []


def capabilities_of(compute_capability: tuple[int, int] | None, driver: int) -> Capabilities:
    """What a GPU of this compute capability can do under this branch of the driver."""
    known = compute_capability or (0, 0)
    return Capabilities(compute_capability, known >= PREEMPTION, known >= PARTITIONS, driver >= CHECKPOINT_DRIVER)


def cores_per_sm(major: int, minor: int) -> int:
    """CUDA cores of one SM by compute capability (CUDA C++ Programming Guide, table of technical specifications)."""
    if major in {6, 7, 8, 9}:
        return 64 if (major, minor) in {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)} else 128
    return 128
