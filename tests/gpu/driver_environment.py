"""Which variables NVIDIA's driver reads, and when: at cuInit, or at a context's creation. No hook, no vGPU.

Each case is a process of its own: a variable is set (or changed) before cuInit or after it, and what the driver made of
it is printed as JSON. ``python -m tests.gpu.driver_environment`` on a GPU; it starts an MPS daemon in directories of
its own for the last cases, and ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def put(name: str, value: str | None) -> None:
    """As the C library sees it: os.environ alone would do in CPython, which calls setenv."""
    libc = ctypes.CDLL(None)
    if value is None:
        libc.unsetenv(name.encode())
    else:
        libc.setenv(name.encode(), value.encode(), 1)


def case(before: dict[str, str], between: dict[str, str | None]) -> dict[str, object]:
    """``before`` is set before cuInit, ``between`` after it and before the first context."""
    for name, value in before.items():
        put(name, value)
    driver = ctypes.CDLL("libcuda.so.1")
    found: dict[str, object] = {"cuInit": driver.cuInit(0)}
    for name, value in between.items():
        put(name, value)
    count, device, context, sms = c_int(), c_int(), c_void_p(), c_int()
    found["count_code"] = driver.cuDeviceGetCount(byref(count))
    found["count"] = count.value
    found["device"] = driver.cuDeviceGet(byref(device), 0)
    found["context"] = driver.cuDevicePrimaryCtxRetain(byref(context), device)
    found["current"] = driver.cuCtxSetCurrent(context)
    driver.cuDeviceGetAttribute(byref(sms), SM_COUNT, device)
    found["sms"] = sms.value
    free, total, pointer = c_size_t(), c_size_t(), c_void_p()
    driver.cuMemGetInfo_v2(byref(free), byref(total))
    found["total_mib"] = total.value >> 20
    found["alloc_2GiB"] = driver.cuMemAlloc_v2(byref(pointer), c_size_t(2 << 30))
    name = c_char_p()
    driver.cuGetErrorName(int(str(found["context"])), byref(name))
    found["context_code"] = name.value.decode() if name.value else ""
    return found


def uuid() -> str:
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True)
    return listed.stdout.split()[0]


def main() -> None:
    if sys.argv[1:]:
        before, between = json.loads(sys.argv[1])
        print(json.dumps(case(before, between)))
        return
    visible = "CUDA_VISIBLE_DEVICES"
    plain: list[tuple[str, dict[str, str], dict[str, str | None]]] = [
        ("nothing", {}, {}),
        ("none visible before", {visible: "-1"}, {}),
        ("none visible after cuInit", {}, {visible: "-1"}),
        ("uuid before, taken away after", {visible: uuid()}, {visible: None}),
        ("none before, uuid after", {visible: "-1"}, {visible: uuid()}),
    ]
    run("plain", plain, {})
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for directory in own.values():
            Path(directory).mkdir()
        environment = {**os.environ, **own}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        try:
            pipe, share, pinned = (
                "CUDA_MPS_PIPE_DIRECTORY",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            )
            where = own[pipe]
            mps: list[tuple[str, dict[str, str], dict[str, str | None]]] = [
                ("pipe before", {pipe: where}, {}),
                ("pipe before, taken away after", {pipe: where}, {pipe: None}),
                ("pipe after cuInit only", {}, {pipe: where}),
                ("share before", {pipe: where, share: "30"}, {}),
                ("share before, taken away after", {pipe: where, share: "30"}, {share: None, pipe: None}),
                ("share after cuInit only", {pipe: where}, {share: "30"}),
                ("memory before", {pipe: where, pinned: "0=1G"}, {}),
                ("memory before, taken away after", {pipe: where, pinned: "0=1G"}, {pinned: None, pipe: None}),
                ("memory after cuInit only", {pipe: where}, {pinned: "0=1G"}),
            ]
            run("mps", mps, {})
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=environment, check=False)


def run(kind: str, cases: list[tuple[str, dict[str, str], dict[str, str | None]]], extra: dict[str, str]) -> None:
    for name, before, between in cases:
        argv = [sys.executable, "-m", "tests.gpu.driver_environment", json.dumps([before, between])]
        ran = subprocess.run(argv, env={**os.environ, **extra}, capture_output=True, text=True, check=False, timeout=60)
        print(f"{kind}: {name}: {ran.stdout.strip() or ran.stderr.strip()[-300:]}", flush=True)


if __name__ == "__main__":
    main()
