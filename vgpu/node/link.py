"""``ControlLink``: the blocking end of the control link, for programs that ask one thing and leave (``vgpuctl``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Attach, Claim
from vgpu.protocol.blocking import PATIENT_S, BlockingLink, client_socket
from vgpu.protocol.codec import Message
from vgpu.protocol.hello import Hello, Request, Welcome
from vgpu.protocol.messages import (
    Confirm,
    Confirmed,
    Create,
    EventList,
    EventReading,
    Events,
    GetMetrics,
    GetSnapshot,
    GpuList,
    Gpus,
    GpuStatus,
    Inspect,
    Lifetime,
    List,
    MetricsSnapshot,
    Migrate,
    ModeChoice,
    NodeStatus,
    Notice,
    Processes,
    ProcessList,
    Remove,
    Resume,
    Set,
    SetGpu,
    Snapshot,
    Status,
    Suspend,
    Trace,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
    Watch,
)
from vgpu.protocol.requests import ENTRY_OF
from vgpu.protocol.tenancy import GetQueue, GetQuota, QueueList, QueueReading, QuotaReading, QuotasSet, SetQuotas
from vgpu.protocol.trace import TraceChunk
from vgpu.protocol.usage import Grouping, Usage, UsageReport, Why, WhyReport
from vgpu.protocol.versions import PROTOCOL_VERSION, REQUEST_IDS_SINCE
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.quota import Quotas
from vgpu.spec import VgpuChanges, VgpuSpec, explain

__all__ = ["PATIENT_S", "ControlLink", "client_socket"]

Result = TypeVar("Result", bound=BaseModel)


class ControlLink(BlockingLink):
    """A link to the node with its control socket at ``path``.

    Use it as a context manager. Every method raises ``VgpuError`` with the node's own reason, or with ``unreachable``,
    ``timeout``, ``version``, ``protocol`` of this end. Not for several threads at once.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = 10.0) -> None:
        """Connects and shakes hands. ``path``: by default the environment's node; ``timeout_s`` bounds each answer."""
        super().__init__(path, timeout_s=timeout_s)
        try:
            self.welcome = self._ask(Hello(), Welcome)
        except BaseException:
            self.close()
            raise

    # --- what can be asked

    def create(
        self,
        spec: VgpuSpec,
        gpu: str = "auto",
        *,
        lifetime: Lifetime = "kept",
        request_id: str = "",
        confirm: bool = True,
        owner_uid: int | None = None,
        claim: Claim | None = None,
        attach: Attach = "owner",
        queue_ns: int | None = None,
    ) -> VgpuStatus:
        """A new vGPU, already admitting processes. ``no-room`` names the largest that would fit.

        ``lifetime`` "process": the node removes the vGPU once this process has ended and no process is attached.
        ``request_id``: the same one again has the same vGPU as its answer; "": this method makes one. ``confirm``
        false: the caller calls ``confirm`` once the answer is where it is needed. Without that, the node removes the
        vGPU when this link ends. ``owner_uid``: as root, the user whose vGPU it will be. ``claim``: the same one again
        has the same vGPU. ``attach`` "mount": each process that a container's mount leads there is admitted.
        ``queue_ns``: wait for room for so long, in the node's queue.
        """
        request = Create(
            spec=spec,
            gpu=gpu,
            lifetime=lifetime,
            request_id=request_id or uuid4().hex,
            owner_uid=owner_uid,
            claim=claim,
            attach=attach,
            queue_ns=queue_ns,
        )
        vgpu = self._ask(request, VgpuStatus)
        if confirm:
            self.confirm(vgpu)
        return vgpu

    def confirm(self, vgpu: VgpuStatus) -> None:
        """The answer to ``create`` has arrived: the vGPU stays. ``not-found``: it is gone."""
        if vgpu.request_id and self.welcome.version >= REQUEST_IDS_SINCE:
            self._ask(Confirm(request_id=vgpu.request_id), Confirmed)

    def set(self, vgpu: str, changes: VgpuChanges) -> VgpuStatus:
        return self._ask(Set(vgpu=vgpu, changes=changes), VgpuStatus)

    def remove(self, vgpu: str, *, force: bool = False) -> VgpuStatus:
        """The last reading of the removed vGPU."""
        return self._ask(Remove(vgpu=vgpu, force=force), VgpuStatus)

    def suspend(self, vgpu: str, resume_on: Sequence[str] = (), resume_at_unix_s: float | None = None) -> VgpuStatus:
        """``invalid``: a trigger that can never be; ``mode``, ``in-use`` or ``unavailable``: its programs go on."""
        try:
            request = Suspend(vgpu=vgpu, resume_on=tuple(resume_on), resume_at_unix_s=resume_at_unix_s)
        except ValidationError as error:
            raise VgpuError(ErrorCode.INVALID, explain(error), "vgpuctl suspend --help") from error
        return self._ask(request, VgpuStatus)

    def resume(self, vgpu: str) -> VgpuStatus:
        """``no-room`` or ``unavailable``: it stays suspended."""
        return self._ask(Resume(vgpu=vgpu), VgpuStatus)

    def migrate(self, vgpu: str, gpu: str) -> VgpuStatus:
        """``no-room``, ``mode``, ``in-use`` or ``unavailable``: the programs go on where they were, unless the message
        says that the vGPU is on the other GPU."""
        return self._ask(Migrate(vgpu=vgpu, gpu=gpu), VgpuStatus)

    def list(self) -> tuple[VgpuStatus, ...]:
        return self._ask(List(), VgpuList).vgpus

    def inspect(self, vgpu: str) -> VgpuDetail:
        return self._ask(Inspect(vgpu=vgpu), VgpuDetail)

    def processes(self, vgpu: str = "") -> ProcessList:
        return self._ask(Processes(vgpu=vgpu), ProcessList)

    def gpus(self) -> tuple[GpuStatus, ...]:
        return self._ask(Gpus(), GpuList).gpus

    def set_gpu(
        self,
        gpu: str,
        *,
        mode: ModeChoice | None = None,
        period_ns: int | None = None,
        window_ns: int | None = None,
        draining: bool | None = None,
    ) -> GpuStatus:
        request = SetGpu(gpu=gpu, mode=mode, period_ns=period_ns, window_ns=window_ns, draining=draining)
        return self._ask(request, GpuStatus)

    def status(self) -> NodeStatus:
        return self._ask(Status(), NodeStatus)

    def look(self) -> Snapshot:
        return self._ask(GetSnapshot(), Snapshot)

    def meter(self) -> MetricsSnapshot:
        return self._ask(GetMetrics(), MetricsSnapshot)

    def events(
        self, vgpu: str = "", *, since_unix_s: float = 0.0, most: int = 1000, kinds: tuple[str, ...] = ()
    ) -> tuple[EventReading, ...]:
        """What has happened, oldest first."""
        request = Events(vgpu=vgpu, since_unix_s=since_unix_s, most=most, kinds=kinds)
        return self._ask(request, EventList).events

    def quota(self, uid: int | None = None) -> QuotaReading:
        """What user ``uid`` (None: this one) may have, and has."""
        return self._ask(GetQuota(uid=uid), QuotaReading)

    def set_quotas(self, quotas: Quotas, queue: QueueRules = DEFAULT_RULES) -> QuotasSet:
        return self._ask(SetQuotas(quotas=quotas, queue=queue), QuotasSet)

    def queue(self) -> tuple[QueueReading, ...]:
        """The requests that wait for room, in the order in which they are tried."""
        return self._ask(GetQueue(), QueueList).waiting

    def usage(
        self,
        *,
        since_unix_s: float = 0.0,
        until_unix_s: float | None = None,
        by: Grouping = "user",
        step_s: int = 0,
    ) -> UsageReport:
        """What was promised and used, also of vGPUs that are gone."""
        request = Usage(since_unix_s=since_unix_s, until_unix_s=until_unix_s, by=by, step_s=step_s)
        return self._ask(request, UsageReport)

    def why(self, vgpu: str) -> WhyReport:
        """Why the vGPU is as fast as it is."""
        return self._ask(Why(vgpu=vgpu), WhyReport)

    def watch(
        self,
        *,
        snapshots: bool = True,
        events: bool = False,
        interval_ns: int = 500_000_000,
        vgpus: tuple[str, ...] = (),
    ) -> Iterator[Notice]:
        """Notices for as long as the caller iterates; the link serves nothing else afterwards."""
        request = Watch(id=self._fresh_id(), snapshots=snapshots, events=events, interval_ns=interval_ns, vgpus=vgpus)
        self._send(request)
        # Between events nothing may happen for hours; with snapshots silence means that the node hangs.
        self._socket.settimeout(self._timeout_s + interval_ns / 1e9 if snapshots else None)
        while True:
            message = self._receive()
            if "ok" in message:
                self._checked(message, request.id)
                continue
            yield _valid(Notice, message)

    def trace(self, gpu: str, duration_ns: int, *, work: bool = True) -> Iterator[TraceChunk]:
        """A recording of a GPU from now on, in chunks; the last one is ``done``. The link serves nothing else then.
        ``work`` False: only leases and waits."""
        request = Trace(id=self._fresh_id(), gpu=gpu, duration_ns=duration_ns, work=work)
        self._send(request)
        while True:
            message = self._receive()
            if "ok" in message:
                self._checked(message, request.id)
            chunk = _valid(Notice, message).trace
            if chunk is None:
                raise VgpuError(ErrorCode.PROTOCOL, "the node answered something else than a recording")
            yield chunk
            if chunk.done:
                return

    # --- how it is asked

    def _ask(self, request: Request, model: type[Result]) -> Result:
        """The node bounds a change, so this end waits for as long as the node is there."""
        is_change = type(request) in ENTRY_OF and ENTRY_OF[type(request)].changes
        self._socket.settimeout(None if is_change else self._timeout_s)
        numbered = request.model_copy(update={"id": self._fresh_id()})
        self._send(numbered)
        return _valid(model, self._checked(self._receive(), numbered.id))

    def _send(self, request: Request) -> None:
        version = PROTOCOL_VERSION if isinstance(request, Hello) else self.welcome.version
        self._send_message(request.said_to(version))


def _valid(model: type[Result], message: Message) -> Result:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        raise VgpuError(
            ErrorCode.VERSION, f"the node's answer is not understood: {explain(error)}", "update st-vgpu on both ends"
        ) from error
