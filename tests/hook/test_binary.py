"""The preload library as a file: what it needs, what it shows, and that it harms nobody it is preloaded into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from client_hook.symbols import intercepted
from tests.hook.stage import HOOK, LIBRARIES

NEWEST_GLIBC = (2, 28)
PRELOADED = {**os.environ, "LD_PRELOAD": str(HOOK)}
PRELOADED.pop("VGPU_ID", None)


def names(*options: str) -> list[str]:
    output = subprocess.run(["nm", "-D", *options, HOOK], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in output.splitlines() if line.split()[-2] != "A"]  # A: a version's own name


def compiled(tmp_path: Path, name: str, source: str, *options: str) -> Path:
    (tmp_path / f"{name}.c").write_text(source)
    target = tmp_path / name
    subprocess.run(["gcc", "-o", target, tmp_path / f"{name}.c", *options], check=True)
    return target


def test_needs_no_python() -> None:
    assert [n for n in names("--undefined-only") if n.startswith(("Py", "_Py"))] == []


def test_loads_on_old_c_libraries() -> None:
    versions = {n: re.search(r"@GLIBC_([\d.]+)", n) for n in names("--undefined-only")}
    too_new = [n for n, v in versions.items() if v and tuple(map(int, v[1].split("."))) > NEWEST_GLIBC]
    assert too_new == []
    needed = subprocess.run(["readelf", "-d", HOOK], capture_output=True, text=True, check=True).stdout
    # where glibc kept them before 2.34: the library must say so, or dlopen and pthread_create are not found there
    assert "libdl.so.2" in needed
    assert "libpthread.so.0" in needed


def test_shows_exactly_what_it_intercepts() -> None:
    """The doors with the C library's versions, everything else without one, as in the driver."""
    old = "GLIBC_2.17" if os.uname().machine == "aarch64" else "GLIBC_2.2.5"
    doors = {f"dlsym@{old}", "dlsym@@GLIBC_2.34", "dlvsym@@GLIBC_2.34"}
    assert set(names("--defined-only")) == {s.name for s in intercepted()} | doors | {"vgpu_hook_version"}


@pytest.mark.parametrize("command", [["/bin/true"], ["sh", "-c", "exit 0"], [sys.executable, "-c", "import ctypes"]])
def test_silent_without_a_vgpu(command: list[str]) -> None:
    ran = subprocess.run(command, env=PRELOADED, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


THREADS_C = """
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
static void *look(void *unused) {
    for (int i = 0; i < 20000; i++) {
        if (dlsym(RTLD_DEFAULT, "strlen") != (void *)strlen) return (void *)1;
        if (dlsym(RTLD_DEFAULT, "cuNoSuchFunction")) return (void *)2;
        if (dlsym(RTLD_DEFAULT, "curl_easy_init")) return (void *)3;
    }
    return unused;
}
int main(void) {
    pthread_t threads[8];
    void *failed = NULL, *one;
    for (int i = 0; i < 8; i++) pthread_create(threads + i, NULL, look, NULL);
    for (int i = 0; i < 8; i++) { pthread_join(threads[i], &one); if (one) failed = one; }
    printf("%ld\\n", (long)failed);
    return 0;
}
"""


def test_threads_look_names_up_at_once(tmp_path: Path) -> None:
    program = compiled(tmp_path, "threads", THREADS_C, "-pthread", "-ldl")
    assert subprocess.run([program], env=PRELOADED, capture_output=True, text=True, check=True).stdout == "0\n"


THIRD_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
/* "Next" means after this library. Were it looked up from the hook, one would find ourselves: endless recursion. */
size_t strlen(const char *s) {
    static size_t (*next)(const char *);
    if (!next) next = (size_t (*)(const char *))dlsym(RTLD_NEXT, "strlen");
    return next == strlen ? 777 : next(s);
}
"""
THIRD_MAIN_C = """
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) { printf("%zu\\n", strlen(argv[1])); return argc - 2; }
"""


@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("hook_first", [True, False])
def test_next_keeps_its_meaning_for_others(tmp_path: Path, level: str, hook_first: bool) -> None:
    third = compiled(tmp_path, "third.so", THIRD_C, "-shared", "-fPIC", "-fno-builtin", level, "-ldl")
    main = compiled(tmp_path, "main", THIRD_MAIN_C, "-fno-builtin", level)
    preload = [str(HOOK), str(third)] if hook_first else [str(third), str(HOOK)]
    ran = subprocess.run(
        [main, "twelve chars"],
        env={**PRELOADED, "LD_PRELOAD": " ".join(preload)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "12\n")


NAMESAKE_C = "int cuInit(unsigned flags) { return 4242 + (int)flags; }"
NAMESAKE_MAIN_C = """
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    printf("%d\\n", init(argc - 2));
    return 0;
}
"""


def test_a_library_keeps_its_own_function_of_a_drivers_name(tmp_path: Path) -> None:
    namesake = compiled(tmp_path, "namesake.so", NAMESAKE_C, "-shared", "-fPIC")
    main = compiled(tmp_path, "asks", NAMESAKE_MAIN_C, "-ldl")
    ran = subprocess.run([main, namesake], env=PRELOADED, capture_output=True, text=True, check=True)
    assert ran.stdout == "4242\n"


CUDART_CU = """
#include <cuda_runtime_api.h>
#include <stdio.h>
int main(void) {
    size_t free_bytes = 0, total_bytes = 0;
    int devices = 0;
    cudaError_t counted = cudaGetDeviceCount(&devices);
    cudaError_t asked = counted ? counted : cudaMemGetInfo(&free_bytes, &total_bytes);
    printf("%d %d %d %zu\\n", (int)counted, (int)asked, devices, total_bytes);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: nothing to link the static CUDA runtime with")
def test_static_cuda_runtime_without_a_driver(tmp_path: Path) -> None:
    (tmp_path / "runtime.cu").write_text(CUDART_CU)
    program = tmp_path / "runtime"
    subprocess.run(["nvcc", "-cudart=static", "-o", program, tmp_path / "runtime.cu"], check=True)
    ran = subprocess.run([program], env=PRELOADED, capture_output=True, text=True, check=True)
    plain = subprocess.run([program], env={**os.environ, "LD_PRELOAD": ""}, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == (plain.stdout, plain.stderr)


def test_simulated_driver_is_built() -> None:
    assert (LIBRARIES / "sim" / "libcuda.so.1").exists()
