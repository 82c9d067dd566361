"""Driver functions that are intercepted only to know which threads are inside the driver.

A checkpointed program waits inside the driver, in whatever function it calls. If its vGPU is to resume by itself
(--idle-suspend), the hook must notice that call. Calls that only read what the process itself knows do not wait, and
are not here. Calls that get a structure by value are not here either (``cuIpcOpenMemHandle``,
``cuIpcOpenEventHandle``).

One function a line: its name, the width of each argument (``p``: eight bytes, ``i``: four; ``-``: there is none), its
version, and the version of its twin for per-thread default streams, if it has one. Names and versions: cuda.h and
cudaTypedefs.h of CUDA 13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_KINDS: Final = {"p": "unsigned long long", "i": "unsigned"}
_CALLS: Final = """
# contexts
cuCtxDisablePeerAccess p 4000
cuCtxEnablePeerAccess pi 4000
cuCtxSetLimit ip 3010
cuCtxWaitEvent pp 12050
cuCtxResetPersistingL2Cache - 11000
cuCtxSetCacheConfig i 3020
cuCtxSetSharedMemConfig i 4020
cuDevicePrimaryCtxSetFlags ii 7000
cuDevicePrimaryCtxSetFlags_v2 ii 11000
cuDeviceSetMemPool ip 11020
cuDeviceSetGraphMemAttribute iip 11040
cuGreenCtxStreamCreate ppii 12050
cuGreenCtxRecordEvent pp 12040
cuGreenCtxWaitEvent pp 12040
# streams and events
cuStreamCreateWithPriority pii 5050
cuStreamWaitEvent ppi 3020 7000
cuStreamCopyAttributes pp 11000 11000
cuStreamSetAttribute pip 11000 11000
cuStreamAddCallback pppi 5000 7000
cuStreamAttachMemAsync pppi 6000 7000
cuLaunchHostFunc ppp 10000 10000
cuLaunchHostFunc_v2 pppi 13010 13010
cuEventDestroy p 2000
cuEventElapsedTime_v2 ppp 12080
cuEventRecordWithFlags ppi 11010 11010
# code
cuModuleLoad pp 2000
cuModuleLoadData pp 2000
cuModuleLoadDataEx ppipp 2010
cuModuleLoadFatBinary pp 2000
cuModuleGetFunction ppp 2000
cuModuleGetGlobal pppp 2000
cuModuleGetGlobal_v2 pppp 3020
cuLibraryLoadData ppppippi 12000
cuLibraryLoadFromFile ppppippi 12000
cuLibraryGetKernel ppp 12000
cuLibraryGetModule pp 12000
cuLibraryGetGlobal pppp 12000
cuLibraryGetManaged pppp 12000
cuKernelGetFunction pp 12000
cuKernelGetAttribute pipi 12000
cuKernelSetAttribute iipi 12000
cuKernelSetCacheConfig pii 12000
cuFuncLoad p 12040
cuFuncGetAttribute pip 2020
cuFuncSetAttribute pii 9000
cuFuncSetCacheConfig pi 3000
cuOccupancyMaxActiveBlocksPerMultiprocessor ppip 6050
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags ppipi 7000
cuOccupancyMaxActiveClusters ppp 11070
cuOccupancyMaxPotentialBlockSize pppppi 6050
cuOccupancyMaxPotentialBlockSizeWithFlags pppppii 7000
cuOccupancyMaxPotentialClusterSize ppp 11070
# memory
cuMemAllocHost pi 2000
cuMemAllocHost_v2 pp 3020
cuMemFreeHost p 2000
cuMemHostAlloc ppi 2020
cuMemHostRegister ppi 4000
cuMemAdvise ppii 8000
cuMemAdvise_v2 ppip 12020
cuMemRangeGetAttribute ppipp 8000
cuMemRangeGetAttributes pppppp 8000
cuMemDiscardBatchAsync ppppp 13000 13000
cuMemBatchDecompressAsync ppipp 12060 12060
cuMemPoolSetAccess ppp 11020
cuMemPoolExportToShareableHandle ppip 11020
cuMemPoolImportFromShareableHandle ppip 11020
cuMemPoolExportPointer pp 11020
cuMemPoolImportPointer ppp 11020
cuMulticastCreate pp 12010
cuMulticastAddDevice pi 12010
cuMulticastBindAddr ppppp 12010
cuMulticastBindAddr_v2 pipppp 13010
cuMulticastUnbind pipp 12010
cuIpcCloseMemHandle p 4010
cuIpcGetEventHandle pp 4010
# textures, and what others share
cuTexObjectCreate pppp 5000
cuTexObjectDestroy p 5000
cuSurfObjectCreate pp 5000
cuSurfObjectDestroy p 5000
cuImportExternalMemory pp 10000
cuDestroyExternalMemory p 10000
cuExternalMemoryGetMappedBuffer ppp 10000
cuExternalMemoryGetMappedMipmappedArray ppp 10000
cuImportExternalSemaphore pp 10000
cuDestroyExternalSemaphore p 10000
cuSignalExternalSemaphoresAsync ppip 10000 10000
cuWaitExternalSemaphoresAsync ppip 10000 10000
cuGraphicsMapResources ipp 3000 7000
cuGraphicsUnmapResources ipp 3000 7000
cuGraphicsUnregisterResource p 3000
cuGraphicsSubResourceGetMappedArray ppii 3000
cuGraphicsResourceGetMappedPointer ppp 3000
cuGraphicsResourceGetMappedPointer_v2 ppp 3020
cuFlushGPUDirectRDMAWrites ii 11030
"""


def calls() -> Iterator[tuple[str, str, str, int, int]]:
    """(name, arguments, base, version, version of the twin or 0) of each."""
    for line in _CALLS.splitlines():
        if line and not line.startswith("#"):
            name, widths, version, *twin = line.split()
            kinds = "" if widths == "-" else widths
            arguments = ", ".join(f"{_KINDS[kind]} {letter}" for kind, letter in zip(kinds, "abcdefgh", strict=False))
            yield name, arguments or "void", name.removesuffix("_v2"), int(version), int(*twin)
