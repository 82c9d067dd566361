"""The HTTP API, ``/api/v1``: the requests of the control link, with its models. What ``vgpuctl … -o json`` prints is
what is answered here; what the node refuses is refused here in the same words."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import trio
from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from vgpu.bounds import LARGEST_REAL, Bounded, BoundedRequest
from vgpu.config import MOST_GPUS
from vgpu.ctl.commandlines import program_line
from vgpu.ctl.present.tables import user_name, with_users
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.hello import Request
from vgpu.protocol.messages import (
    Create,
    EventList,
    EventReading,
    Events,
    GetSnapshot,
    GpuList,
    Gpus,
    GpuStatus,
    Inspect,
    List,
    Migrate,
    ModeChoice,
    NodeStatus,
    Processes,
    ProcessList,
    ProcessReading,
    Remove,
    Resume,
    Set,
    SetGpu,
    Snapshot,
    Status,
    Suspend,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
)
from vgpu.protocol.requests import entry_of
from vgpu.protocol.service import AnyModel, ask
from vgpu.protocol.tenancy import GetQueue, GetQuota, QueueList, QueueReading, QuotaReading
from vgpu.protocol.usage import Grouping, Usage, UsageReport, Why, WhyReport
from vgpu.spec import PeriodNs, VgpuChanges, VgpuSpec, WindowNs, explain
from vgpu.web.feed import Feed
from vgpu.web.history import History
from vgpu.web.streams import everything, leases
from vgpu.web.timelines import Timelines

LEAST_S: Final = 20.0
"""More than the node's own patience with a GPU Server that is being restarted."""
MARGIN_S: Final = 20.0
"""Beyond the node's own time limit: the node's answer names the reason."""
STATUS_OF: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.AMBIGUOUS: 409,
    ErrorCode.REMOVED: 410,
    ErrorCode.EXISTS: 409,
    ErrorCode.NOT_YOURS: 403,
    ErrorCode.NO_ROOM: 409,
    ErrorCode.QUOTA: 403,
    ErrorCode.IN_USE: 409,
    ErrorCode.FULL: 409,
    ErrorCode.MODE: 409,
    ErrorCode.UNREACHABLE: 503,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.VERSION: 502,
    ErrorCode.PROTOCOL: 502,
    ErrorCode.MISSING: 501,
    ErrorCode.INTERNAL: 500,
}


class Refused(Bounded):
    """Every answer that is not 2xx. ``hint``: what to type next, or ""."""

    code: ErrorCode
    error: str
    hint: str = ""


class GpuChanges(BoundedRequest):
    """As ``vgpuctl gpu set``: what is given replaces what is so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: ModeChoice | None = None
    period_ns: PeriodNs | None = None
    window_ns: WindowNs | None = None
    draining: bool | None = None


class Labels(Bounded):
    """``users``: names by uid. ``commands``: the command line of the first program, by vGPU. ``engine``: the socket of
    the container engine; "": the dashboard shows no containers."""

    host: str
    users: dict[str, str]
    commands: dict[str, str]
    engine: str = ""


def named(vgpus: Iterable[VgpuStatus], attached: Iterable[ProcessReading]) -> Labels:
    """The labels of these vGPUs and of their programs, from this machine's users and /proc."""
    programs: dict[str, list[ProcessReading]] = {}
    for process in attached:
        programs.setdefault(process.vgpu_id, []).append(process)
    commands = {}
    for vgpu_id, those in programs.items():
        first = min(those, key=lambda process: (process.slot, process.pid))
        commands[vgpu_id] = program_line(first.pid, first.command)
    users = {str(uid): user_name(uid) for uid in sorted({vgpu.owner_uid for vgpu in vgpus})}
    return Labels(host=socket.gethostname(), users=users, commands=commands)


REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Refused} for status in sorted({401, 413, 421, *STATUS_OF.values()})
}
VgpuQuery = Annotated[str, Query(description="Id, unambiguous prefix of one, or name; all without it.")]


def api(control_socket: Path, feed: Feed, timelines: Timelines, engine: str = "") -> APIRouter:
    """Its routes, for the node at ``control_socket``. ``engine``: as in ``Labels``."""
    router = APIRouter(prefix="/api/v1", responses=REFUSALS)

    async def node(request: Request, model: type[AnyModel]) -> AnyModel:
        try:
            return await ask(control_socket, request, model, max(LEAST_S, entry_of(request).limit_s + MARGIN_S))
        except ValidationError as error:
            raise VgpuError(ErrorCode.VERSION, f"the node's answer is not understood: {explain(error)}") from error
        except ProtocolError as error:
            raise VgpuError(ErrorCode.PROTOCOL, f"the node broke the rules of its link: {error}") from error

    @router.get("/status", tags=["node"])
    async def status() -> NodeStatus:
        """The node itself; as `vgpuctl status -o json`."""
        return await node(Status(), NodeStatus)

    @router.get("/snapshot", tags=["node"])
    async def snapshot() -> Snapshot:
        """Everything that moves, at this instant."""
        return await node(GetSnapshot(), Snapshot)

    @router.get("/history", tags=["node"])
    async def history(seconds: Annotated[float, Query(ge=1, le=300)] = 300.0) -> History:
        """The last seconds of the figures that charts show."""
        return feed.samples.since(time.time() - seconds)

    @router.get("/events", tags=["node"])
    async def events(
        vgpu: VgpuQuery = "",
        since_unix_s: Annotated[float, Query(ge=-LARGEST_REAL, le=LARGEST_REAL, allow_inf_nan=False)] = 0.0,
        most: Annotated[int, Query(ge=1, le=2000)] = 1000,
    ) -> tuple[EventReading, ...]:
        """What has happened, oldest first."""
        return (await node(Events(vgpu=vgpu, since_unix_s=since_unix_s, most=most), EventList)).events

    @router.get("/usage", tags=["node"])
    async def usage(
        since_unix_s: Annotated[float, Query(ge=0, le=1e11)] = 0.0,
        until_unix_s: Annotated[float | None, Query(ge=0, le=1e11)] = None,
        by: Grouping = "user",
        step_s: Annotated[int, Query(ge=0, le=1_000_000_000)] = 0,
    ) -> UsageReport:
        """What was promised and used, as `vgpuctl usage -o json`; in steps of `step_s` seconds if that is not 0."""
        asked = Usage(since_unix_s=since_unix_s, until_unix_s=until_unix_s, by=by, step_s=step_s)
        return await trio.to_thread.run_sync(with_users, await node(asked, UsageReport))

    @router.get("/stream", tags=["streams"], response_class=StreamingResponse)
    async def stream() -> StreamingResponse:
        """Server-sent events: `link` (LinkState), `snapshot` (Snapshot, twice a second), `event` (EventReading)."""
        feed.admit()
        return _stream(everything(feed))

    @router.get("/gpus/{index}/timeline", tags=["streams"], response_class=StreamingResponse)
    async def timeline(index: Annotated[int, PathParameter(ge=0, lt=MOST_GPUS)]) -> StreamingResponse:
        """Server-sent events: `chunk` (TraceChunk of leases and waits, ten a second), `failure` (Failure)."""
        feed.admit()
        if all(gpu.index != index for gpu in (await node(Gpus(), GpuList)).gpus):
            raise VgpuError(ErrorCode.NOT_FOUND, f"there is no GPU {index}", "vgpuctl gpu ls")
        return _stream(leases(timelines, index))

    @router.get("/gpus", tags=["GPUs"])
    async def gpus() -> tuple[GpuStatus, ...]:
        """As `vgpuctl gpu ls -o json`."""
        return (await node(Gpus(), GpuList)).gpus

    @router.patch("/gpus/{gpu}", tags=["GPUs"])
    async def set_gpu(gpu: str, changes: GpuChanges) -> GpuStatus:
        """As `vgpuctl gpu set`. `gpu`: index or UUID."""
        _some(changes, "vgpuctl gpu set GPU --mode temporal --period 40ms")
        return await node(SetGpu(gpu=gpu, **changes.model_dump()), GpuStatus)

    @router.get("/labels", tags=["node"])
    async def labels() -> Labels:
        """What the page calls things: this machine, the owners of vGPUs, and what runs in each of them."""
        vgpus = (await node(List(), VgpuList)).vgpus
        attached = (await node(Processes(vgpu=""), ProcessList)).processes
        found = await trio.to_thread.run_sync(named, vgpus, attached)
        return found.model_copy(update={"engine": engine})

    @router.get("/processes", tags=["vGPUs"])
    async def processes(vgpu: VgpuQuery = "") -> tuple[ProcessReading, ...]:
        """As `vgpuctl ps -o json`."""
        return (await node(Processes(vgpu=vgpu), ProcessList)).processes

    @router.get("/queue", tags=["vGPUs"])
    async def queue() -> tuple[QueueReading, ...]:
        """The requests that wait for room, as `vgpuctl queue -o json`."""
        return (await node(GetQueue(), QueueList)).waiting

    @router.get("/quota", tags=["vGPUs"])
    async def quota(
        uid: Annotated[int | None, Query(ge=0, lt=1 << 32, description="As root: another user's.")] = None,
    ) -> QuotaReading:
        """As `vgpuctl quota -o json`."""
        return await node(GetQuota(uid=uid), QuotaReading)

    @router.get("/vgpus", tags=["vGPUs"])
    async def vgpus() -> tuple[VgpuStatus, ...]:
        """As `vgpuctl ls -o json`."""
        return (await node(List(), VgpuList)).vgpus

    @router.post("/vgpus", status_code=201, tags=["vGPUs"])
    async def create(
        spec: VgpuSpec, gpu: Annotated[str, Query(description="auto, an index or a UUID.")] = "auto"
    ) -> VgpuStatus:
        """As `vgpuctl create`: sizes and durations also as texts (`"8G"`, `"30%"`, `"8h"`)."""
        return await node(Create(spec=spec, gpu=gpu), VgpuStatus)

    @router.get("/vgpus/{ref}", tags=["vGPUs"])
    async def inspect(ref: str) -> VgpuDetail:
        """As `vgpuctl inspect -o json`. `ref`: id, unambiguous prefix of one, or name."""
        return await node(Inspect(vgpu=ref), VgpuDetail)

    @router.patch("/vgpus/{ref}", tags=["vGPUs"])
    async def change(ref: str, changes: VgpuChanges) -> VgpuStatus:
        """As `vgpuctl set`: what is given replaces what is so, from the next token on."""
        _some(changes, "vgpuctl set VGPU --sm 50 --mem 16G")
        return await node(Set(vgpu=ref, changes=changes), VgpuStatus)

    @router.delete("/vgpus/{ref}", tags=["vGPUs"])
    async def remove(ref: str, force: bool = False) -> VgpuStatus:
        """As `vgpuctl rm`; `force`: even with programs in it; their next call fails."""
        return await node(Remove(vgpu=ref, force=force), VgpuStatus)

    @router.get("/vgpus/{ref}/why", tags=["vGPUs"])
    async def why(ref: str) -> WhyReport:
        """As `vgpuctl why`."""
        return await node(Why(vgpu=ref), WhyReport)

    @router.post("/vgpus/{ref}/suspend", tags=["vGPUs"])
    async def suspend(
        ref: str,
        resume_on: Annotated[tuple[str, ...], Query(description="call, or tcp: and a port; several are allowed.")] = (),
        resume_at_unix_s: Annotated[float | None, Query(description="A time, in seconds since 1970.")] = None,
    ) -> VgpuStatus:
        """As `vgpuctl suspend`: takes as long as its memory takes to the host's."""
        try:
            request = Suspend(vgpu=ref, resume_on=resume_on, resume_at_unix_s=resume_at_unix_s)
        except ValidationError as error:
            raise VgpuError(ErrorCode.INVALID, explain(error), "resume_on=tcp:8000") from error
        return await node(request, VgpuStatus)

    @router.post("/vgpus/{ref}/resume", tags=["vGPUs"])
    async def resume(ref: str) -> VgpuStatus:
        """As `vgpuctl resume`."""
        return await node(Resume(vgpu=ref), VgpuStatus)

    @router.post("/vgpus/{ref}/migrate", tags=["vGPUs"])
    async def migrate(ref: str, gpu: Annotated[str, Query(description="An index or a UUID.")]) -> VgpuStatus:
        """As `vgpuctl migrate`: with its running programs, to another GPU of the node."""
        return await node(Migrate(vgpu=ref, gpu=gpu), VgpuStatus)

    return router


def _some(changes: BaseModel, hint: str) -> None:
    if not changes.model_dump(exclude_none=True):
        raise VgpuError(ErrorCode.INVALID, "nothing to change", hint)


def _stream(messages: Any) -> StreamingResponse:
    return StreamingResponse(messages, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
