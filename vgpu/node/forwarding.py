"""The way of a request to the GPU Server that answers it. The node adds the uid of the client, from the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.routing import find_vgpu
from vgpu.node.servers import ServerProcess
from vgpu.node.survey import StatusCollector
from vgpu.protocol.messages import AnyRequest, Forward, VgpuStatus
from vgpu.protocol.requests import entry_of
from vgpu.protocol.service import AnyModel, ask

FIND_AGAIN_S: Final = 0.05
RESTART_S: Final = 8.0
"""How long a request waits for a server that restarts. A restart takes half a second, and seconds on a busy machine."""


class Forwarder:
    """Sends requests to the GPU Servers. ``processes``: by the index of the GPU."""

    def __init__(self, processes: Mapping[int, ServerProcess], survey: StatusCollector) -> None:
        self._processes = processes
        self._survey = survey

    async def find(self, reference: str, uid: int) -> VgpuStatus:
        """The vGPU that ``uid`` means. While a server restarts, its last report may lack vGPUs, so the node waits for
        the server."""
        deadline = trio.current_time() + RESTART_S
        while True:
            snapshot = await self._survey.snapshot()
            away = {gpu.index: gpu.reason for gpu in snapshot.gpus if gpu.state == "restarting"}
            try:
                vgpu = find_vgpu(reference, snapshot.vgpus, uid)
                if vgpu.gpu_index not in away:
                    return vgpu
            except VgpuError as error:
                if error.code is not ErrorCode.NOT_FOUND or not away:
                    raise
            if trio.current_time() > deadline:
                index, reason = next(iter(away.items()))
                raise not_served(index, reason)
            await trio.sleep(FIND_AGAIN_S)

    async def to_vgpu(self, vgpu: VgpuStatus, request: AnyRequest, uid: int, model: type[AnyModel]) -> AnyModel:
        """Forward to the server of the GPU that has the vGPU. If the vGPU has moved meanwhile, forward to the server
        that has it now."""
        exact = request.model_copy(update={"vgpu": vgpu.vgpu_id})
        while True:
            try:
                return await self.to_gpu(vgpu.gpu_index, exact, uid, model)
            except VgpuError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                now = await self.find(vgpu.vgpu_id, uid)
                if now.gpu_index == vgpu.gpu_index:
                    raise
                vgpu = now

    async def to_gpu(self, index: int, request: AnyRequest, uid: int, model: type[AnyModel]) -> AnyModel:
        process = await self.served(index)
        return await ask(process.socket, Forward(uid=uid, request=request), model, entry_of(request).limit_s)

    async def served(self, index: int) -> ServerProcess:
        process = self._processes[index]
        with trio.move_on_after(RESTART_S):
            await process.up.wait()
        if not process.serving:
            raise not_served(index, process.reason)
        return process


def not_served(index: int, reason: str) -> VgpuError:
    return VgpuError(ErrorCode.UNAVAILABLE, f"GPU {index} is not served: {reason}", "see: vgpuctl gpu ls")
