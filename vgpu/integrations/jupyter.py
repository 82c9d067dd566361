"""The kernel provisioner: a vGPU is made with a notebook's kernel, and removed with it."""

from __future__ import annotations

from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Unicode

from vgpu import extras
from vgpu.api.handle import Vgpu, discard
from vgpu.api.node import Node

extras.need("the kernel provisioner of st-vgpu", "aio")
import anyio.to_thread  # noqa: E402


class VgpuProvisioner(LocalProvisioner):
    """A local kernel in a vGPU of its own. ``sm``, ``mem``, ``gpu``: as ``vgpu.create``; they stand in the kernel's
    specification. A restarted kernel keeps its vGPU."""

    sm = Unicode("10", config=True)
    mem = Unicode("", config=True)
    gpu = Unicode("auto", config=True)
    vgpu: Vgpu | None = None

    async def pre_launch(self, **options: Any) -> dict[str, Any]:
        if self.vgpu is None:
            self.vgpu = await anyio.to_thread.run_sync(self._create)
        options = await super().pre_launch(**options)
        options["env"] = self.vgpu.environ(options.get("env"))
        return options

    def _create(self) -> Vgpu:
        return Node().create(sm=self.sm, mem=self.mem or None, gpu=self.gpu)

    async def cleanup(self, restart: bool = False) -> None:
        await super().cleanup(restart)
        if self.vgpu is not None and not restart:
            gone, self.vgpu = self.vgpu, None
            await anyio.to_thread.run_sync(discard, gone.id, None)
