"""Programs that a CUDA program starts find the environment that they would find without a vGPU: all but ``VGPU_*``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.hook.stage import Stage, StagedVgpu

CHILDREN = """
import ctypes, json, os, subprocess, sys, tempfile
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
libc = ctypes.CDLL(None)
def shown(start):
    with tempfile.TemporaryFile() as file:
        own = os.dup(1)
        os.dup2(file.fileno(), 1)
        start()
        os.dup2(own, 1)
        file.seek(0)
        return dict(line.split("=", 1) for line in file.read().decode(errors="replace").split("\\0") if "=" in line)
def spawned():
    pid, argv = ctypes.c_int(), (ctypes.c_char_p * 3)(b"env", b"-0")
    table = ctypes.c_void_p.in_dll(libc, "environ")
    assert libc.posix_spawnp(ctypes.byref(pid), b"env", None, None, argv, table) == 0
    os.waitpid(pid.value, 0)
print(json.dumps({
    "system": shown(lambda: libc.system(b"env -0")),
    "subprocess": shown(lambda: subprocess.run(["env", "-0"], check=True)),
    "posix_spawn": shown(spawned),
}))
"""
SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}
"""What a shell sets itself."""

OWN = {
    "CUDA_VISIBLE_DEVICES": "0",
    "CUDA_MPS_PIPE_DIRECTORY": "/own/pipe",
    "CUDA_MPS_LOG_DIRECTORY": "/own/log",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "77",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64G",
    "CUDA_MPS_CLIENT_PRIORITY": "1",
}


def found_by_children(stage: Stage, environment: dict[str, str]) -> dict[str, dict[str, str]]:
    ran = stage.run(CHILDREN, environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, str]] = json.loads(ran.stdout)
    return {
        way: {name: value for name, value in seen.items() if not name.startswith("VGPU_") and name not in SHELL}
        for way, seen in found.items()
    }


@pytest.fixture(params=["temporal", "spatial"])
def either(request: pytest.FixtureRequest, stage: Stage) -> StagedVgpu:
    if request.param == "temporal":
        return stage.vgpu()
    vgpu = stage.spatial_vgpu()
    vgpu.reply_changes |= {
        "mps_log_directory": "/its/log",
        "mps_pinned_memory_limit": "0=2G",
        "mps_client_priority": "0",
    }
    return vgpu


@pytest.mark.parametrize("own", [{}, OWN], ids=["none of its own", "its own"])
def test_children_find_what_the_user_has_set(stage: Stage, either: StagedVgpu, own: dict[str, str]) -> None:
    inside = stage.environment(either, **own)
    without = {name: value for name, value in inside.items() if name not in ("VGPU_ID", "LD_PRELOAD")}
    expected = found_by_children(stage, without)
    found = found_by_children(stage, inside)
    for way, seen in found.items():
        assert seen.pop("LD_PRELOAD") == inside["LD_PRELOAD"]
        assert seen == expected[way], way


CHANGED_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* A thread that changes the environment while the driver starts. */
char *getenv(const char *name) {
    static char *(*next)(const char *);
    static int done;
    if (!next) next = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
    char *value = next(name);
    if (!done && value && !strcmp(name, "CUDA_VISIBLE_DEVICES") && !strncmp(value, "GPU-", 4)) {
        done = 1;
        CHANGE;
        ((int (*)(unsigned))dlsym(RTLD_DEFAULT, "cuInit"))(-1);
    }
    return value;
}
"""


def while_starting(tmp_path: Path, environment: dict[str, str], change: str) -> dict[str, str]:
    """The environment with a library in front that does this in the middle of the driver's cuInit."""
    (tmp_path / "changed.c").write_text(CHANGED_C.replace("CHANGE", change))
    changed = tmp_path / "changed.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", changed, tmp_path / "changed.c", "-ldl"], check=True)
    return environment | {"LD_PRELOAD": f"{changed}:{environment['LD_PRELOAD']}"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ('setenv("ADDED", "1", 1)', {"ADDED": "1", "CUDA_VISIBLE_DEVICES": "0"}),
        ('setenv("THERE", "other", 1)', {"THERE": "other", "CUDA_VISIBLE_DEVICES": "0"}),
        ('unsetenv("THERE")', {"THERE": None, "CUDA_VISIBLE_DEVICES": "0"}),
        ('setenv("CUDA_VISIBLE_DEVICES", "5", 1)', {"CUDA_VISIBLE_DEVICES": "5", "CUDA_MPS_PIPE_DIRECTORY": None}),
        ("(void)0", {"THERE": "before", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": None}),
    ],
)
def test_what_a_program_changes_meanwhile_stays(
    stage: Stage, tmp_path: Path, change: str, expected: dict[str, str | None]
) -> None:
    """It may even start the driver again from within."""
    environment = stage.environment(stage.vgpu(), CUDA_VISIBLE_DEVICES="0", THERE="before")
    environment = while_starting(tmp_path, environment, change)
    read = f"""
import ctypes
print(ctypes.CDLL("libcuda.so.1").cuInit(0))
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
for name in {list(expected)}:
    print(name, (libc.getenv(name.encode()) or b"").decode())
"""
    ran = stage.run(read, environment)
    code, *lines = ran.stdout.splitlines()
    assert code == "0", ran.stderr
    assert dict((line + " ").split(" ")[:2] for line in lines) == {k: v or "" for k, v in expected.items()}


MPS = {
    "CUDA_MPS_PIPE_DIRECTORY": "mps_pipe_directory",
    "CUDA_MPS_LOG_DIRECTORY": "mps_log_directory",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "mps_active_thread_percentage",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "mps_pinned_memory_limit",
    "CUDA_MPS_CLIENT_PRIORITY": "mps_client_priority",
}


@pytest.mark.parametrize("percentage", ["30.31", ""], ids=["a part of the SMs", "all SMs"])
def test_under_mps_the_driver_finds_what_it_was_told(stage: Stage, tmp_path: Path, percentage: str) -> None:
    """Whatever the program's own environment says: SMs, memory as the second line of defence, priority, daemon."""
    vgpu = stage.spatial_vgpu()
    told = vgpu.reply_changes | {
        "mps_log_directory": str(tmp_path / "log"),
        "mps_active_thread_percentage": percentage,
        "mps_pinned_memory_limit": "0=2048M",
        "mps_client_priority": "0",
    }
    vgpu.reply_changes = told
    shown = " ".join(f'puts(next("{name}") ? next("{name}") : "");' for name in MPS) + " fflush(stdout);"
    environment = while_starting(tmp_path, stage.environment(vgpu, **OWN), shown)
    ran = stage.run('import ctypes; print(ctypes.CDLL("libcuda.so.1").cuInit(0))', environment)
    assert ran.stdout.splitlines() == [*(told[field] for field in MPS.values()), "0"], ran.stderr


def test_a_child_is_in_the_vgpu_again(stage: Stage) -> None:
    """By the user's own list, and in a vGPU of which its parent has taken nothing away."""
    vgpu = stage.vgpu()
    program = """
import ctypes, os, subprocess, sys
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
again = "import ctypes; cu = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); print(cu.cuInit(0));" \\
        "cu.cuDeviceGetCount(ctypes.byref(n)); print(n.value)"
print(subprocess.check_output([sys.executable, "-c", again], text=True).split())
"""
    ran = stage.run(program, stage.environment(vgpu, CUDA_VISIBLE_DEVICES="0"))
    assert ran.stdout == "['0', '1']\n", ran.stderr
    assert [request["role"] for request in vgpu.requests] == ["process", "process"]
