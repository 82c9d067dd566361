"""Programs built with gcc's sanitizers start in a vGPU: their runtimes come first, and the hook still holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from client_hook.sanitizers import needed, sanitizers, with_sanitizers_first
from tests.hook.stage import GIB, HOOK, LIBRARIES, Stage

MAIN_C = """
#include <stdio.h>
#include <stdlib.h>
typedef unsigned long size;
extern int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemGetInfo_v2(size *, size *), cuMemAlloc_v2(unsigned long long *, size);
int main(void) {
    int device = 0;
    void *context = 0;
    size free_bytes = 0, total = 0;
    unsigned long long pointer = 0;
    printf("%d ", cuInit(0));
    cuDeviceGet(&device, 0), cuDevicePrimaryCtxRetain(&context, device), cuCtxSetCurrent(context);
    cuMemGetInfo_v2(&free_bytes, &total);
    printf("%lu %d\\n", total >> 20, cuMemAlloc_v2(&pointer, 2UL << 30));
    fflush(stdout);
    _Exit(0); /* what the driver keeps is no leak of the program's */
}
"""

MAGIC = b"\x7fELF\x02\x01"


@pytest.mark.parametrize("kind", ["address", "undefined", "thread"])
def test_a_sanitized_program_starts_and_is_limited(stage: Stage, tmp_path: Path, kind: str) -> None:
    (tmp_path / "main.c").write_text(MAIN_C)
    main = tmp_path / "main"
    command = ["gcc", f"-fsanitize={kind}", "-o", main, tmp_path / "main.c", LIBRARIES / "sim/libcuda.so.1"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"gcc here has no runtime for -fsanitize={kind}")
    environment = stage.environment(stage.vgpu(memory_bytes=GIB))
    environment = with_sanitizers_first(str(main), environment)
    ran = subprocess.run([main], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0 1024 2\n"), ran.stderr


def test_what_needs_none_stays_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    before = {"PATH": "/usr/bin:/bin", "LD_PRELOAD": f"/some/other.so:{HOOK}"}
    for program in ("/bin/sh", "sh", str(script), "/nowhere/at/all", sys.executable):
        assert with_sanitizers_first(program, before) == before
    assert "libc.so.6" in list(needed(Path("/bin/sh")))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", MAGIC + b"\xff" * 200, MAGIC + b"\0" * 58])
def test_a_file_that_is_no_program(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert sanitizers(tmp_path / "file") == []


def test_run_puts_it_before_the_hook(stage: Stage, tmp_path: Path) -> None:
    """And where the system loads the hook, so that LD_PRELOAD has nothing else."""
    (tmp_path / "main.c").write_text("int main(void) { return 7; }")
    main = tmp_path / "main"
    if subprocess.run(["gcc", "-fsanitize=address", "-o", main, tmp_path / "main.c"], check=False).returncode:
        pytest.skip("gcc here has no runtime for -fsanitize=address")
    (name,) = sanitizers(main)
    for preload, expected in ((str(HOOK), f"{name}:{HOOK}"), ("", name), (f"{name}:{HOOK}", f"{name}:{HOOK}")):
        environment = with_sanitizers_first("main", {"PATH": str(tmp_path), "LD_PRELOAD": preload})
        assert environment["LD_PRELOAD"] == expected
        assert subprocess.run([main], env=environment, check=False).returncode == 7
