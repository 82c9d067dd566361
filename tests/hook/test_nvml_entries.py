"""Every function of NVML is classified in docs/internals/driver-functions.md, and what lists processes or memory
lists the vGPU's alone. ``nvml-entries.txt``: the names in ``nvml.h`` of NVML 13.5."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from client_hook.symbols import intercepted
from tests.hook.stage import GIB, Stage
from tests.hook.test_completeness import headers

ENTRIES = Path(__file__).with_name("nvml-entries.txt").read_text().split()
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "driver-functions.md"
TELLING = re.compile("Process|Pids|Accounting|Session|Memory|MemSize|BAR1|FbUsage|FBC|Framebuffer")
HEADERS = sorted(folder / "nvml.h" for folder in headers() if (folder / "nvml.h").exists())


def patterns(section: str) -> list[str]:
    (text,) = [part for part in re.split(r"^## ", PAGE.read_text(), flags=re.M) if part.startswith(section + "\n")]
    rows = re.findall(r"^\| (`nvml.*?) \| ", text, re.M)
    return [name for row in rows for name in re.findall(r"`(nvml[^`]+)`", row)]


def filtered() -> set[str]:
    return {symbol.name for symbol in intercepted() if symbol.library == "nvml"}


def test_the_filtered_ones_are_those_that_the_hook_intercepts() -> None:
    assert set(patterns("NVML: filtered")) == filtered()
    assert filtered() <= set(ENTRIES)


def test_every_other_one_is_left_alone_for_a_reason() -> None:
    left = patterns("NVML: left alone")
    unknown = [n for n in ENTRIES if n not in filtered() and not any(fnmatchcase(n, pattern) for pattern in left)]
    assert unknown == []
    telling = [n for n in ENTRIES if TELLING.search(n) and n not in filtered() | set(left)]
    assert telling == [], "these may list processes or memory: name them, with the reason, or filter them"
    assert [pattern for pattern in left if not any(fnmatchcase(n, pattern) for n in ENTRIES)] == []


@pytest.mark.skipif(not HEADERS, reason="no nvml.h here")
def test_a_newer_header_brings_nothing_unknown() -> None:
    for header in HEADERS:
        names = set(re.findall(r"DECLDIR +(nvml\w+)", header.read_text()))
        assert sorted(names - set(ENTRIES)) == [], f"{header}: add them to nvml-entries.txt, and to the page"


PROGRAM = """
import ctypes, json, sys
from ctypes import *
from tests.hook.app import App
app = App()
app.allocate(64 << 20)
kernel = app.kernel(5.0)
nvml = CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()
device = c_void_p()
nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device))

class Details(Structure):
    _fields_ = [("version", c_uint), ("mode", c_uint), ("count", c_uint), ("entries", c_void_p)]

class Loads(Structure):
    _fields_ = [("version", c_uint), ("count", c_uint), ("since", c_ulonglong), ("entries", c_void_p)]

def pids(memory, count, size, offset):
    return sorted(c_uint.from_buffer(memory, i * size + offset).value for i in range(count))

def listed(name, size, offset, room):
    count, memory = c_uint(room), create_string_buffer(room * size or 1)
    code = getattr(nvml, name)(device, byref(count), memory if room else None)
    return [code, count.value, pids(memory, min(count.value, room) if code == 0 else 0, size, offset)]

def details(mode, room):
    memory = create_string_buffer(room * 32 or 1)
    asked = Details(24 | 1 << 24, mode, room, addressof(memory) if room else None)
    code = nvml.nvmlDeviceGetRunningProcessDetailList(device, byref(asked))
    return [code, asked.count, pids(memory, asked.count if code == 0 else 0, 32, 0)]

def loads(room):
    memory = create_string_buffer(room * 40 or 1)
    asked = Loads(24 | 1 << 24, room, 0, addressof(memory) if room else None)
    code = nvml.nvmlDeviceGetProcessesUtilizationInfo(device, byref(asked))
    return [code, asked.count, pids(memory, asked.count if code == 0 else 0, 40, 8)]

def samples(room):
    count, memory = c_uint(room), create_string_buffer(room * 32 or 1)
    code = nvml.nvmlDeviceGetProcessUtilization(device, memory if room else None, byref(count), c_ulonglong(0))
    return [code, count.value, pids(memory, count.value if code == 0 else 0, 32, 0)]

def accounts(pid):
    stats = create_string_buffer(128)
    c_uint.from_buffer(stats).value = pid
    return [nvml.nvmlDeviceGetAccountingStats(device, pid, create_string_buffer(128)),
            nvml.nvmlDeviceGetAccountingStats_v2(device, stats)]

def memories():
    found = []
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetConfComputeProtectedMemoryUsage"):
        info = (c_ulonglong * 3)()
        found.append([getattr(nvml, name)(device, info), info[0]])
    return found

def nothing():
    return [getattr(nvml, name)(device, *[None] * count) for name, count in NULLS]

NULLS = [("nvmlDeviceGetComputeRunningProcesses", 2), ("nvmlDeviceGetComputeRunningProcesses_v3", 2),
         ("nvmlDeviceGetMPSComputeRunningProcesses_v3", 2), ("nvmlDeviceGetGraphicsRunningProcesses_v3", 2),
         ("nvmlDeviceGetRunningProcessDetailList", 1), ("nvmlDeviceGetProcessesUtilizationInfo", 1),
         ("nvmlDeviceGetAccountingPids", 2), ("nvmlDeviceGetAccountingStats_v2", 1),
         ("nvmlDeviceGetEncoderSessions", 2), ("nvmlDeviceGetFBCSessions", 2), ("nvmlDeviceGetMemoryInfo", 1)]

def work():
    while samples(8)[0] != 0 or not samples(8)[2]:
        kernel.launch()
        app.synchronize()
    return True

print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""

COMPUTE = [
    ("nvmlDeviceGetComputeRunningProcesses", 16, 0),
    ("nvmlDeviceGetComputeRunningProcesses_v2", 24, 0),
    ("nvmlDeviceGetComputeRunningProcesses_v3", 24, 0),
    ("nvmlDeviceGetAccountingPids", 4, 0),
]
NONE_HERE = [
    ("nvmlDeviceGetGraphicsRunningProcesses", 16, 0),
    ("nvmlDeviceGetGraphicsRunningProcesses_v2", 24, 0),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", 24, 0),
    ("nvmlDeviceGetMPSComputeRunningProcesses", 16, 0),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v2", 24, 0),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", 24, 0),
    ("nvmlDeviceGetEncoderSessions", 32, 4),
    ("nvmlDeviceGetFBCSessions", 48, 4),
]
INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_SIZE = 2, 6, 7


def test_every_list_has_the_vgpus_own_processes_and_memory_alone(stage: Stage) -> None:
    ours, others = stage.vgpu(), stage.vgpu()
    programs = [stage.start(PROGRAM, stage.environment(vgpu)) for vgpu in (ours, ours, others)]
    for vgpu in (ours, others):
        vgpu.open()
    for program in programs:
        assert stage.heard(program) == "ready"

    def asked(expression: str, program: int = 0) -> Any:
        stage.tell(programs[program], expression)
        return json.loads(stage.heard(programs[program]))

    own, neighbour = sorted(program.pid for program in programs[:2]), programs[2].pid
    for name, size, offset in COMPUTE:
        assert asked(f"listed({name!r}, {size}, {offset}, 8)") == [0, 2, own], name
        assert asked(f"listed({name!r}, {size}, {offset}, 8)", 2) == [0, 1, [neighbour]], name
        for room in (0, 1):
            assert asked(f"listed({name!r}, {size}, {offset}, {room})") == [INSUFFICIENT_SIZE, 2, []], name
    for name, size, offset in NONE_HERE:
        assert asked(f"listed({name!r}, {size}, {offset}, 8)") == [0, 0, []], name
    assert asked("details(0, 8)") == [0, 2, own]
    assert asked("details(1, 8)") == asked("details(2, 8)") == [0, 0, []]
    assert asked("details(0, 1)") == asked("details(0, 0)") == [INSUFFICIENT_SIZE, 2, []]
    assert asked(f"accounts({own[1]})") == [0, 0]
    assert asked(f"accounts({neighbour})") == [NOT_FOUND, NOT_FOUND]
    assert asked("memories()") == [[0, 8 * GIB]] * 2
    assert set(asked("nothing()")) == {INVALID_ARGUMENT}
    assert asked("work()", 2) is True
    assert set(asked("samples(8)")[2]) <= set(own)
    assert set(asked("loads(8)")[2]) <= set(own)
    assert asked("work()") is True
    for question in ("samples(8)", "loads(8)"):
        assert neighbour not in asked(question)[2], question
