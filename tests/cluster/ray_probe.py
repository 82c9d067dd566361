"""What a task or an actor of Ray, or a task of Dask, finds of its vGPU. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    pid: int
    init: int
    """cuInit's result."""
    devices: int
    total_mib: int
    vgpu_ids: str
    visible: str | None


def find() -> Found:
    cuda = ctypes.CDLL("libcuda.so.1")
    init = cuda.cuInit(0)
    count, total = ctypes.c_int(), ctypes.c_size_t()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value:
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Found(os.getpid(), init, count.value, total.value >> 20, os.environ.get("VGPU_ID", ""), visible)


class Actor:
    """For ``ray.remote``."""

    def find(self) -> Found:
        return find()
