"""The kernel provisioner: a vGPU is made with a notebook's kernel, and removed with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Unicode

from vgpu import extras
from vgpu.api.handle import Vgpu, discard
from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError

extras.need("the kernel provisioner of st-vgpu", "aio")
import anyio.to_thread  # noqa: E402

NOTEBOOK: Final = "JPY_SESSION_NAME"
"""Jupyter's variable with the path of the notebook, in the environment of its kernel."""
LONGEST_NAME: Final = 63


def name_of(environment: Mapping[str, str]) -> str | None:
    """A vGPU's name after the notebook, so that lists show which notebook uses the GPU; None for a kernel without."""
    stem = PurePath(environment.get(NOTEBOOK, "")).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:LONGEST_NAME] or None


class VgpuProvisioner(LocalProvisioner):
    """A local kernel in a vGPU of its own. ``sm``, ``mem``, ``gpu``: as ``vgpu.create``; they stand in the kernel's
    specification. A restarted kernel keeps its vGPU, which has the notebook's name unless another vGPU has it."""

    sm = Unicode("10", config=True)
    mem = Unicode("", config=True)
    gpu = Unicode("auto", config=True)
    vgpu: Vgpu | None = None

    async def pre_launch(self, **options: Any) -> dict[str, Any]:
        if self.vgpu is None:
            self.vgpu = await anyio.to_thread.run_sync(self._create, name_of(options.get("env") or {}))
        options = await super().pre_launch(**options)
        options["env"] = self.vgpu.environ(options.get("env"))
        return options

    def _create(self, name: str | None) -> Vgpu:
        node = Node()
        try:
            return node.create(sm=self.sm, mem=self.mem or None, gpu=self.gpu, name=name)
        except VgpuError as error:
            if name is None or error.code is not ErrorCode.EXISTS:
                raise
        return node.create(sm=self.sm, mem=self.mem or None, gpu=self.gpu)

    async def cleanup(self, restart: bool = False) -> None:
        await super().cleanup(restart)
        if self.vgpu is not None and not restart:
            gone, self.vgpu = self.vgpu, None
            await anyio.to_thread.run_sync(discard, gone.id, None)
