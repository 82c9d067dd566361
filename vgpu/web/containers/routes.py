"""The routes of containers, below ``/api/v1``. They reach containers with a vGPU, and no others.

The engine's socket is as good as root. So a page chooses among the images of the configuration file by name, and names
the container: it can give no mount, no privilege and no other flag.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import trio
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from vgpu.api.link import Link, Reading, open_link
from vgpu.bounds import Bounded
from vgpu.config import ImageConfig
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cgroups, keeper
from vgpu.integrations.engines import LABEL, SocketEngine
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import Failure, Processes, ProcessList
from vgpu.protocol.service import ask
from vgpu.spec import refuse_like_id
from vgpu.web.api import LEAST_S, REFUSALS
from vgpu.web.containers.engine import EngineApi
from vgpu.web.containers.frames import Output
from vgpu.web.containers.models import ENTRY_LABEL, Container, Image, NewContainer
from vgpu.web.feed import Feed
from vgpu.web.streams import BREATH, BREATH_S, sse

PENDING: Final = 64
"""Messages of a log between the engine and a page. A slow page makes the engine wait, and nothing else."""
KEEPER_S: Final = 10.0
LIVING: Final = frozenset({"running", "paused", "restarting"})
"""States in which engines refuse a removal, each with a status of its own."""


class LogOutput(Bounded):
    """A piece of a log; it may end within a line."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(slots=True)
class Kept:
    """A vGPU for a container that is being made."""

    vgpu: Reading
    volumes: list[str]
    keeper: subprocess.Popen[bytes]

    def let_go(self) -> None:
        """From here on the keeper looks whether the engine has the container."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()


class Containers:
    """``images``: by their names. ``nursery``: for logs that are being read."""

    def __init__(
        self, address: str, images: Mapping[str, ImageConfig], control_socket: Path, feed: Feed, nursery: trio.Nursery
    ) -> None:
        self.images = images
        self.feed = feed
        self.engine = EngineApi(address)
        self._kept_by = SocketEngine(address)
        self._control_socket = control_socket
        self._nursery = nursery
        self._keepers: list[subprocess.Popen[bytes]] = []

    def resume(self) -> None:
        """Start keepers for the vGPUs of this engine's containers whose keepers have died."""
        with suppress(VgpuError), ControlLink(self._control_socket) as node:
            for vgpu in node.list():
                if (
                    keeper.engine_of(vgpu) == self._kept_by
                    and vgpu.owner_uid == os.geteuid()
                    and not keeper.is_kept(vgpu)
                ):
                    self._keepers.append(keeper.resume(self._kept_by, vgpu.vgpu_id))

    async def all(self) -> list[Container]:
        """Those with a vGPU: by the label, else by the cgroups of the programs that are attached."""
        processes = (await ask(self._control_socket, Processes(vgpu=""), ProcessList, LEAST_S)).processes
        places = await trio.to_thread.run_sync(lambda: [cgroups.of_process(process.pid) for process in processes])
        inside: dict[str, set[str]] = {}
        for process, place in zip(processes, places, strict=True):
            for container_id in place.containers:
                inside.setdefault(container_id, set()).add(process.vgpu_id)
        return [
            container
            if container.vgpus
            else container.model_copy(update={"vgpus": tuple(sorted(inside[container.id]))})
            for container in await self.engine.containers()
            if container.vgpus or container.id in inside
        ]

    async def one(self, ref: str) -> Container:
        """By its name, its id, or a beginning of its id that no other has."""
        containers = await self.all()
        exact = [container for container in containers if ref in {container.id, container.name}]
        found = exact or [container for container in containers if ref and container.id.startswith(ref)]
        if len(found) > 1:
            raise VgpuError(ErrorCode.AMBIGUOUS, f"{ref!r} may be {', '.join(container.name for container in found)}")
        if not found:
            raise VgpuError(
                ErrorCode.NOT_FOUND, f"no container {ref!r} has a vGPU", "those that have one: GET /api/v1/containers"
            )
        return found[0]

    async def start(self, wanted: NewContainer) -> Container:
        """A new container in a new vGPU."""
        image = self.images.get(wanted.image)
        if image is None:
            there_are = (
                f"there are {', '.join(self.images)}" if self.images else "the configuration file has no [image.NAME]"
            )
            raise VgpuError(ErrorCode.NOT_FOUND, f"there is no image {wanted.image!r} to start", there_are)
        refuse_like_id(wanted.name)
        name = wanted.name or f"{wanted.image[:56]}-{secrets.token_hex(3)}"
        await self.engine.check_image(image.image)
        self._keepers = [process for process in self._keepers if process.poll() is None]
        kept = await trio.to_thread.run_sync(self._make, image, name)
        labels = {LABEL: kept.vgpu["vgpu_id"], ENTRY_LABEL: wanted.image}
        uuid = "" if kept.vgpu["simulated"] else kept.vgpu["gpu_uuid"]
        try:
            container_id = await self.engine.create(name, image, labels, kept.volumes, uuid)
            try:
                await self.engine.start(container_id)
            except VgpuError:
                await self.engine.remove(container_id, force=True)
                raise
        except VgpuError:
            kept.let_go()
            with suppress(subprocess.TimeoutExpired):
                await trio.to_thread.run_sync(kept.keeper.wait, KEEPER_S)
            raise
        finally:
            kept.let_go()
        return await self.one(container_id)

    def _make(self, image: ImageConfig, name: str) -> Kept:
        spec = image.spec(name).model_dump(mode="json", exclude_none=True)
        process = keeper.spawn(self._kept_by)
        assert process.stdin is not None
        try:
            with open_link(self._control_socket) as link:
                for number, gpu in enumerate(choices := _gpus(link, image)):
                    try:
                        made = keeper.make(link, spec, gpu, self._kept_by, process.pid, process.stdin.fileno())
                        break
                    except VgpuError as error:
                        if error.code is not ErrorCode.NO_ROOM or number == len(choices) - 1:
                            raise
        except BaseException:
            process.communicate(b"")
            raise
        self._keepers.append(process)
        return Kept(*made, process)

    async def log(self, container: Container, lines: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """*output* (``LogOutput``) messages, then *end*, or *failure* (``Failure``)."""
        send, receive = trio.open_memory_channel[bytes](PENDING)
        scope = trio.CancelScope()

        async def read() -> None:
            with scope:
                async with send, aclosing(self.engine.log(container.id, most_lines=lines, follow=follow)) as outputs:
                    try:
                        async for output in outputs:
                            await send.send(_said(output))
                        await send.send(sse("end", b"{}"))
                    except VgpuError as error:
                        failure = Failure(id=1, code=error.code, error=error.message, hint=error.hint)
                        await send.send(sse("failure", failure.model_dump_json().encode()))

        self._nursery.start_soon(read)
        try:
            while True:
                message = BREATH
                with trio.move_on_after(BREATH_S):
                    try:
                        message = await receive.receive()
                    except trio.EndOfChannel:
                        return
                yield message
        finally:
            scope.cancel()


def _said(output: Output) -> bytes:
    return sse("output", LogOutput(stream=output.stream, text=output.text).model_dump_json().encode())


def _gpus(link: Link, image: ImageConfig) -> list[str]:
    """The GPUs to try, one after the other; the one with most room first."""
    if image.mode is None:
        return ["auto"]
    fitting = [gpu for gpu in link.ask("gpus")["gpus"] if gpu["mode"] == image.mode]
    if not fitting:
        raise VgpuError(ErrorCode.MODE, f"no GPU is in {image.mode} mode", f"vgpuctl gpu set GPU --mode {image.mode}")
    return [str(gpu["index"]) for gpu in sorted(fitting, key=lambda gpu: float(gpu["guaranteed_ratio"]))]


def routes(containers: Containers) -> APIRouter:
    router = APIRouter(prefix="/api/v1", responses=REFUSALS, tags=["containers"])

    @router.get("/images")
    async def images() -> tuple[Image, ...]:
        """What may be started: the sections `[image.NAME]` of the configuration file."""
        return tuple(
            Image(
                name=name,
                image=image.image,
                command=image.command,
                sm_percent=image.sm_percent,
                memory_bytes=image.memory_bytes,
                mode=image.mode,
            )
            for name, image in containers.images.items()
        )

    @router.get("/containers")
    async def all_containers() -> list[Container]:
        """The engine's containers with a vGPU, running or not."""
        return await containers.all()

    @router.post("/containers", status_code=201)
    async def new_container(wanted: NewContainer) -> Container:
        """Start one of the images in a vGPU of its own, which goes with the container."""
        return await containers.start(wanted)

    @router.get("/containers/{ref}")
    async def one_container(ref: str) -> Container:
        """`ref`: name, id, or the beginning of an id."""
        return await containers.one(ref)

    @router.post("/containers/{ref}/start")
    async def start(ref: str) -> Container:
        """Start it again, in the same vGPU."""
        container = await containers.one(ref)
        await containers.engine.start(container.id)
        return await containers.one(container.id)

    @router.post("/containers/{ref}/stop")
    async def stop(ref: str) -> Container:
        """SIGTERM to its first process; SIGKILL after ten seconds. Its vGPU stays."""
        container = await containers.one(ref)
        await containers.engine.stop(container.id)
        return container.model_copy(update={"state": "exited", "status": "stopped"})

    @router.delete("/containers/{ref}")
    async def remove(ref: str, force: bool = False) -> Container:
        """Remove it; its vGPU goes, too. `force`: even while it runs."""
        container = await containers.one(ref)
        if container.state in LIVING and not force:
            raise VgpuError(ErrorCode.IN_USE, f"container {container.name} is {container.state}", "stop it first")
        await containers.engine.remove(container.id, force=force)
        return container

    @router.get("/containers/{ref}/logs", response_class=StreamingResponse)
    async def logs(
        ref: str, tail: Annotated[int, Query(ge=0, le=10_000)] = 500, follow: bool = False
    ) -> StreamingResponse:
        """Server-sent events: `output` (LogOutput), then `end`, or `failure` (Failure)."""
        containers.feed.admit()
        container = await containers.one(ref)
        stream = containers.log(container, tail, follow)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router
