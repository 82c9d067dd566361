from vgpu import aio as aio
from vgpu import dask as dask
from vgpu import models as models
from vgpu import ray as ray
from vgpu import testing as testing
from vgpu.api.handle import Vgpu as Vgpu
from vgpu.api.node import Node as Node
from vgpu.api.require import require as require
from vgpu.api.toplevel import connect as connect
from vgpu.api.toplevel import create as create
from vgpu.api.toplevel import current as current
from vgpu.api.toplevel import list_vgpus as list
from vgpu.errors import ErrorCode as ErrorCode
from vgpu.errors import VgpuError as VgpuError
from vgpu.integrations.ipython import load_ipython_extension as load_ipython_extension
from vgpu.spec import VgpuSpec as VgpuSpec

__all__ = [
    "ErrorCode",
    "Node",
    "Vgpu",
    "VgpuError",
    "VgpuSpec",
    "aio",
    "connect",
    "create",
    "current",
    "list",
    "require",
]
