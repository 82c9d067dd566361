"""Every way to a driver function leads to the wrapper of exactly that function."""

from __future__ import annotations

import json

import pytest

from client_hook.symbol import PER_THREAD, PER_THREAD_SYNCHRONOUS
from client_hook.symbols import SYMBOLS, intercepted
from tests.hook.stage import Stage

DOORS = """
import ctypes, json, os
from ctypes import c_void_p
from client_hook.symbols import intercepted
from tests.hook.app import proc_address
hook = ctypes.CDLL(os.environ["LD_PRELOAD"])
driver = ctypes.CDLL("libcuda.so.1")
dlsym = ctypes.CDLL(None).dlsym
dlsym.restype, dlsym.argtypes = c_void_p, (c_void_p, ctypes.c_char_p)
answers = {}
for s in intercepted():
    if s.library != "cuda":
        continue
    answers[s.name] = {
        "wrapper": ctypes.cast(hook[s.name], c_void_p).value,
        "handle": dlsym(driver._handle, s.name.encode()),
        "default": dlsym(None, s.name.encode()),
        "asked": proc_address(driver, s.base, s.version, 2 if s.per_thread else 0),
    }
others = {n: proc_address(driver, n, 13000) for n in ("", "cuNoSuchFunction", "cuDeviceGet", "cuDeviceGetName")}
print(json.dumps([answers, others]))
"""


def test_all_doors_lead_to_the_same_wrapper(stage: Stage) -> None:
    ran = stage.run(DOORS, stage.environment(stage.vgpu()))
    assert ran.returncode == 0, ran.stderr
    answers, others = json.loads(ran.stdout)
    there = {name: a for name, a in answers.items() if a["handle"] is not None}
    assert {"cuInit", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuStreamBeginCapture_v2", "cuMemAlloc_v2"} <= set(there)
    for name, answer in there.items():
        assert answer["handle"] == answer["wrapper"], name
        assert answer["default"] == answer["wrapper"], name
        if answer["asked"]:
            assert answer["asked"] == answer["wrapper"], name
    wrappers = {a["wrapper"] for a in answers.values()}
    assert len(wrappers) == len(answers)
    assert others[""] == 0
    assert others["cuNoSuchFunction"] == 0
    assert others["cuDeviceGet"] not in wrappers | {0}
    assert others["cuDeviceGetName"] not in wrappers | {0}


NEWER_ASKED = """
import ctypes, os
from tests.hook.app import proc_address
driver = ctypes.CDLL("libcuda.so.1")
hook = ctypes.CDLL(os.environ["LD_PRELOAD"])
at = lambda name: ctypes.cast(hook[name], ctypes.c_void_p).value
print(proc_address(driver, "cuLaunchKernel", 13000) == at("cuLaunchKernel"))
print(proc_address(driver, "cuLaunchKernel", 13000, 2) == at("cuLaunchKernel_ptsz"))
print(proc_address(driver, "cuStreamBeginCapture", 10000) == at("cuStreamBeginCapture"))
print(proc_address(driver, "cuStreamBeginCapture", 13000) == at("cuStreamBeginCapture_v2"))
print(proc_address(driver, "cuGetProcAddress", 13000) == at("cuGetProcAddress_v2"))
print(proc_address(driver, "cuGetProcAddress", 11030) == at("cuGetProcAddress"))
"""


def test_version_and_flags_of_the_caller_decide(stage: Stage) -> None:
    ran = stage.run(NEWER_ASKED, stage.environment(stage.vgpu()))
    assert ran.stdout.split() == ["True"] * 6, ran.stdout + ran.stderr


def test_version_of_the_hook(stage: Stage) -> None:
    program = """
    import ctypes, os
    version = ctypes.CDLL(os.environ["LD_PRELOAD"]).vgpu_hook_version
    version.restype = ctypes.c_char_p
    print(version().decode())
    """
    assert stage.run(program, stage.environment(stage.vgpu())).stdout.startswith("0.")


def test_the_list_is_sound() -> None:
    names = [s.name for s in SYMBOLS]
    assert len(set(names)) == len(names)
    assert [s.name for s in intercepted()] == sorted(s.name for s in SYMBOLS if s.intercepted)
    for symbol in SYMBOLS:
        assert symbol.per_thread == symbol.name.endswith((PER_THREAD, PER_THREAD_SYNCHRONOUS))
        assert all(kind and name.isidentifier() for kind, name in symbol.parameters)


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuMemAllocAsync"])
def test_stdio_have_twins(name: str) -> None:
    twins = {s.name: s for s in intercepted()}
    assert twins[name].arguments == twins[f"{name}_ptsz"].arguments
