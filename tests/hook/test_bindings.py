"""Programs and libraries that bind to the driver's names in their own way: another dlsym before ours, a test double."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.hook.stage import GIB, HOOK, LIBRARIES, Stage

OTHER_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
static void *(*next)(void *, const char *);
void *dlsym(void *handle, const char *name) {
    if (!next) next = NEXT;
    return next(handle, name);
}
"""
ALLOCATES = """
import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
cu = ctypes.CDLL("libcuda.so.1")
device, context, free, total, pointer = c_int(), c_void_p(), c_size_t(), c_size_t(), c_uint64()
cu.cuInit(0), cu.cuDeviceGet(byref(device), 0), cu.cuDevicePrimaryCtxRetain(byref(context), device)
cu.cuCtxSetCurrent(context), cu.cuMemGetInfo_v2(byref(free), byref(total))
print(total.value >> 20, cu.cuMemAlloc_v2(byref(pointer), c_size_t(2 << 30)))
"""


def compiled(tmp_path: Path, name: str, source: str, *options: str | Path) -> Path:
    (tmp_path / f"{name}.c").write_text(source)
    target = tmp_path / name
    subprocess.run(["gcc", "-o", target, tmp_path / f"{name}.c", *options], check=True)
    return target


OLD = "GLIBC_2.17" if os.uname().machine == "aarch64" else "GLIBC_2.2.5"


@pytest.mark.parametrize(
    "found",
    [
        f'dlvsym(RTLD_NEXT, "dlsym", "{OLD}")',
        'dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34")',
        f'dlvsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym", "{OLD}")',
        'dlvsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym", "GLIBC_2.34")',
    ],
)
def test_another_dlsym_before_ours_leads_to_ours(stage: Stage, tmp_path: Path, found: str) -> None:
    other = compiled(tmp_path, "other.so", OTHER_C.replace("NEXT;", f"{found};", 1), "-shared", "-fPIC", "-ldl")
    environment = stage.environment(stage.vgpu(memory_bytes=GIB))
    ran = stage.run(ALLOCATES, environment | {"LD_PRELOAD": f"{other}:{HOOK}"})
    assert ran.stdout == "1024 2\n", ran.stderr


DOUBLE_C = """
int cuInit(unsigned flags) { return 4242 + (int)flags; }
int cuMemAlloc_v2(unsigned long long *pointer, unsigned long size) { *pointer = size; return 4243; }
int cuMemGetInfo_v2(unsigned long *free, unsigned long *total) { *free = *total = 7; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 77; return 0; }
"""
DOUBLE_MAIN_C = """
#include <stdio.h>
extern int cuInit(unsigned), cuMemAlloc_v2(unsigned long long *, unsigned long);
extern int cuMemGetInfo_v2(unsigned long *, unsigned long *);
extern int nvmlDeviceGetCount_v2(unsigned *);
int main(void) {
    unsigned long long pointer = 0;
    unsigned long free = 0, total = 0;
    unsigned count = 0;
    printf("%d ", cuInit(0));
    printf("%d ", cuMemAlloc_v2(&pointer, 5));
    cuMemGetInfo_v2(&free, &total);
    nvmlDeviceGetCount_v2(&count);
    printf("%llu %lu %u\\n", pointer, total, count);
    return 0;
}
"""


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("with_driver", [True, False])
def test_a_linked_double_keeps_its_functions(stage: Stage, tmp_path: Path, inside: bool, with_driver: bool) -> None:
    """Also where the driver is linked behind it."""
    double = compiled(tmp_path, "libdouble.so", DOUBLE_C, "-shared", "-fPIC")
    drivers = [LIBRARIES / "sim/libcuda.so.1", LIBRARIES / "sim/libnvidia-ml.so.1"] if with_driver else []
    main = compiled(tmp_path, "main", DOUBLE_MAIN_C, "-Wl,--no-as-needed", double, *drivers)
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu)
    if not inside:
        del environment["VGPU_ID"]
    ran = subprocess.run([main], env=environment, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("4242 4243 5 7 77\n", "")
    assert vgpu.requests == []


BEFORE_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int cuInit(unsigned flags) {
    puts("before");
    return ((int (*)(unsigned))dlsym(HANDLE, "cuInit"))(flags);
}
"""
BEFORE_MAIN_C = """
#include <stdio.h>
typedef unsigned long size;
extern int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemGetInfo_v2(size *, size *), cuMemAlloc_v2(unsigned long long *, size);
int main(void) {
    int device = 0;
    void *context = 0;
    size free = 0, total = 0;
    unsigned long long pointer = 0;
    printf("%d ", cuInit(0));
    cuDeviceGet(&device, 0), cuDevicePrimaryCtxRetain(&context, device), cuCtxSetCurrent(context);
    cuMemGetInfo_v2(&free, &total);
    printf("%lu %d\\n", total >> 20, cuMemAlloc_v2(&pointer, 2UL << 30));
    return 0;
}
"""


@pytest.mark.parametrize("handle", ["RTLD_NEXT", 'dlopen("libcuda.so.1", RTLD_LAZY)'])
def test_a_linked_library_that_goes_on_to_the_driver_is_held_to_the_vgpu(
    stage: Stage, tmp_path: Path, handle: str
) -> None:
    before = compiled(tmp_path, "libbefore.so", BEFORE_C.replace("HANDLE", handle), "-shared", "-fPIC", "-ldl")
    driver = LIBRARIES / "sim/libcuda.so.1"
    main = compiled(tmp_path, "main", BEFORE_MAIN_C, "-Wl,--no-as-needed", before, driver)
    vgpu = stage.vgpu(memory_bytes=GIB)
    ran = subprocess.run([main], env=stage.environment(vgpu), capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("before\n0 1024 2\n", "")
    assert len(vgpu.requests) == 1


def test_dlvsym_is_a_door(stage: Stage, tmp_path: Path) -> None:
    """The driver's functions have no version; dlvsym gives one without for any."""
    program = """
    import ctypes, os
    from ctypes import c_char_p, c_void_p
    driver = ctypes.CDLL("libcuda.so.1")
    dlvsym = ctypes.CDLL(None).dlvsym
    dlvsym.restype, dlvsym.argtypes = c_void_p, (c_void_p, c_char_p, c_char_p)
    hook = ctypes.CDLL(os.environ["LD_PRELOAD"])
    asked = [dlvsym(handle, b"cuInit", b"ANY") for handle in (driver._handle, None)]
    print(set(asked) <= {None, ctypes.cast(hook.cuInit, c_void_p).value})
    print(dlvsym(driver._handle, b"cuNoSuchFunction", b"ANY"), dlvsym(None, b"strlen", b"GLIBC_2.2.5") is not None)
    """
    ran = stage.run(program, stage.environment(stage.vgpu()))
    assert ran.stdout.splitlines() == ["True", "None True"], ran.stderr
