"""The node's end of a creation. The node asks a GPU Server, on a link that stays open until the client has the answer.

If the client leaves, or the node dies, that link ends, and the server removes the vGPU. If the server dies, the node
asks the next one by the same id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.node.servers import ServerProcess
from vgpu.protocol.hello import Hello, Request
from vgpu.protocol.messages import Await, Confirm, Confirmed, Create, Forward, VgpuStatus
from vgpu.protocol.service import AnyModel, checked, open_link
from vgpu.protocol.stream import LINK_ENDED, MessageStream
from vgpu.protocol.versions import REQUEST_IDS_SINCE

ADMISSION_S: Final = 15.0
MAKING_S: Final = 60.0
"""As long as a GPU Server may take: for the broker, and for vGPUs that have to leave the card first."""
RESTART_S: Final = 8.0


@dataclass(slots=True, eq=False)
class Creation:
    """One vGPU on its way. ``begin``, ``finish``, ``confirm``, in this order; ``close`` in any case. ``VgpuError``: the
    server's reason, unavailable, or timeout; then the vGPU is not made, or the server takes it back."""

    server: ServerProcess
    request: Create
    uid: int
    asker: Process
    link: MessageStream | None = None
    version: int = 0
    reading: VgpuStatus | None = None

    async def begin(self) -> VgpuStatus:
        """Wait until the server admits the vGPU. If the server has just ended, the next one is asked."""
        with trio.move_on_after(ADMISSION_S):
            try:
                self.reading = await self._create()
            except LINK_ENDED:
                await self._again()
            except VgpuError as error:
                if error.code is not ErrorCode.UNAVAILABLE or not await self._has_lost_link():
                    raise
                await self._again()
            assert self.reading is not None
            return self.reading
        raise self._late(ADMISSION_S)

    async def _create(self) -> VgpuStatus:
        self.close()
        self.link, welcome = await open_link(self.server.socket, Hello())
        self.version = welcome.version
        reading = await self._ask(self.request, VgpuStatus)
        if reading.request_id and reading.request_id != self.request.request_id:  # the claim has a vGPU already
            self.request = self.request.model_copy(update={"request_id": reading.request_id})
        return reading

    async def finish(self) -> VgpuStatus:
        """Wait until the vGPU is made."""
        assert self.reading is not None
        if self.version < REQUEST_IDS_SINCE:
            return self.reading
        with trio.move_on_after(MAKING_S):
            self.reading = await self._insist(Await(request_id=self.request.request_id), VgpuStatus)
            return self.reading
        raise self._late(MAKING_S)

    async def confirm(self) -> Confirmed:
        """The client has the answer. The server keeps the vGPU."""
        assert self.reading is not None
        if self.version >= REQUEST_IDS_SINCE:
            with trio.move_on_after(MAKING_S) as patience:
                await self._insist(Confirm(request_id=self.request.request_id), Confirmed)
            if patience.cancelled_caught:
                raise self._late(MAKING_S)
        self.close()
        return Confirmed(vgpu_id=self.reading.vgpu_id)

    async def _insist(self, request: Request, model: type[AnyModel]) -> AnyModel:
        """Ask the server. If it ended meanwhile, ask the next one: first for the vGPU, then ``request`` again."""
        while True:
            try:
                return await self._ask(request, model)
            except LINK_ENDED:
                pass
            except VgpuError as error:
                if error.code is not ErrorCode.UNAVAILABLE or not await self._has_lost_link():
                    raise
            await self._again()

    async def _has_lost_link(self) -> bool:
        """Whether the link has ended. Otherwise the server has refused the request."""
        if self.link is None:
            return True
        with trio.move_on_after(0.05):
            await self.link.until_left()
            return True
        return False

    async def _again(self) -> None:
        """Create again on the next server. It finds the vGPU if its predecessor had recorded it, and else makes one."""
        while True:
            with trio.move_on_after(RESTART_S):
                await self.server.up.wait()
            if not self.server.serving:
                text = f"GPU {self.server.index} is not served: {self.server.reason}"
                raise VgpuError(ErrorCode.UNAVAILABLE, text, "see: vgpuctl gpu ls")
            try:
                self.reading = await self._create()
                return
            except LINK_ENDED:
                await trio.sleep(0.05)
            except VgpuError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                await trio.sleep(0.05)

    async def _ask(self, request: Request, model: type[AnyModel]) -> AnyModel:
        if self.link is None:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the link to GPU {self.server.index}'s server has ended")
        asker = (self.asker.pid, self.asker.start_time)
        forward = Forward.model_validate({"uid": self.uid, "asker": asker, "request": request})
        await self.link.send(forward.said_to(self.version))
        return model.model_validate(checked(await self.link.receive()))

    def _late(self, limit_s: float) -> VgpuError:
        return VgpuError(
            ErrorCode.TIMEOUT,
            f"the server of GPU {self.server.index} did not make the vGPU within {limit_s:g} s",
            "see: vgpuctl logs",
        )

    def close(self) -> None:
        """Unless it is confirmed, the server takes the vGPU back."""
        if self.link is not None:
            self.link.close()
            self.link = None
