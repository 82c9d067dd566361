"""Every entry point of CUDA 13.5 that submits work, allocates or ends something is intercepted in all its versions and
both twins, or excused here with a reason. To be counted is not enough. ``cuda-entries.txt``: their names as
cudaTypedefs.h has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client_hook.symbols import intercepted

ENTRIES = Path(__file__).with_name("cuda-entries.txt")
FAMILIES = (
    "Launch|FabricCpy|GraphLaunch|GraphExec|GraphInstantiate|GraphUpload|DeviceGraphMem|Memcpy|Memset|MemPrefetch|MemAlloc|MemFree|MemBatch|MemDiscard|MemMap|"
    "MemPool|MemCreate|MemRelease|MemUnmap|MemRetain|Array|Array3D|Mipmapped|Ctx.*Destroy|CtxDetach|DevicePrimary|"
    "GreenCtx|ModuleUnload|LibraryUnload|StreamBegin|StreamEnd|StreamBatch|StreamW|StreamDestroy|StreamAttach|"
    "StreamUpdate|StreamAddCallback|Stream.*Sync|Event.*Sync|CtxSync|SignalExternal|WaitExternal|LaunchHost"
)
EXCUSES = {
    r"cuMem(cpy|set)\w*_v(2000|3000)": "take device addresses of 32 bits: no memory of a 64-bit process has one",
    r"cu(Mipmapped)?Array(3D)?Get\w+": "ask",
    r"cuGraphExecGet(Flags|Id)_v\d+": "asks",
    r"cuGreenCtxGet\w+": "ask",
    r"cuDevicePrimaryCtxGetState_v7000": "asks",
    r"cuMemPoolGet\w+": "ask",
    r"cuMemPool(Export|Import|SetAccess)\w+": "share what is charged where it was allocated",
    r"cuDevicePrimaryCtx(Retain|SetFlags)\w+": "make a context: its memory is implicit",
    r"cuGreenCtxStreamCreate\w+": "makes a stream",
    r"cuGreenCtx(RecordEvent|WaitEvent)_v12040": "order work, and are none",
    r"cuStreamWaitEvent\w+": "orders work, and is none",
    r"cu(Signal|Wait)ExternalSemaphoresAsync\w+": "order work, and are none",
    r"cuStreamUpdateCaptureDependencies\w+": "of a capture, which passes",
    r"cuStream(Begin|End)CaptureToCig\w+": "into a command list of graphics, which no gate sees",
    r"cuLaunchHostFunc\w+": "the host's work",
    r"cuStreamAddCallback\w+": "the host's work",
    r"cuMem(AllocHost|FreeHost)\w+": "the host's memory",
    r"cuMemMapArrayAsync\w+": "maps what cuMemCreate was charged for",
    r"cuMemDiscardBatchAsync\w+": "moves nothing",
    r"cuStreamAttachMemAsync\w+": "says who sees managed memory",
    r"cuMemBatchDecompressAsync\w+": "an engine of its own, which Hopper does not have; charged to nobody",
}


def entries() -> list[str]:
    return ENTRIES.read_text().split()


def parts(entry: str) -> tuple[str, int, bool]:
    """(base, version, whether stream 0 is the thread's own), as cuGetProcAddress is asked."""
    found = re.fullmatch(r"(\w+?)_v(\d+)(_ptsz|_ptds)?", entry)
    assert found
    return found[1], int(found[2]), bool(found[3])


def test_every_entry_is_intercepted_or_excused() -> None:
    known = {(s.base, s.version, s.per_thread) for s in intercepted() if not s.bare}
    left_out = [e for e in entries() if parts(e) not in known]
    assert [e for e in left_out if not any(re.fullmatch(excuse, e) for excuse in EXCUSES)] == []


def test_no_excuse_is_for_nothing_or_for_what_is_intercepted() -> None:
    known = {(s.base, s.version, s.per_thread) for s in intercepted() if not s.bare}
    for excuse in EXCUSES:
        excused = [e for e in entries() if re.fullmatch(excuse, e)]
        assert excused, excuse
        assert [e for e in excused if parts(e) in known] == [], excuse


def test_the_list_is_the_headers() -> None:
    header = next(iter(sorted(Path("/usr/local").glob("cuda*/include/cudaTypedefs.h"))), None)
    if header is None or "v13050" not in (text := header.read_text()):
        pytest.skip("no header of CUDA 13 here")
    found = set(re.findall(rf"PFN_(cu(?:{FAMILIES})\w*_v\d+(?:_ptsz|_ptds)?)\b", text))
    assert found - set(entries()) == set()
    assert set(entries()) - found == set()
