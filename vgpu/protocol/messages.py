"""Messages of the control link: the requests of ``vgpuctl`` to a node, and the answers. pydantic, msgpack on the wire.

A link begins with ``Hello``/``Welcome``. Then every request carries an ``id``. The node answers it by exactly one
``Reply`` or ``Failure`` with the same ``id``. It answers ``Watch`` and ``Trace`` by ``Notice`` messages with their
``id`` until the link closes.
Node and GPU Servers use the same messages, so the node passes a request on to the server that owns the vGPU.

Units: ``_ns`` durations in nanoseconds, ``_unix_s`` seconds since 1970, ``_ratio`` 0–1 of one GPU, ``_percent`` 0–100,
``_bytes``. Requests refuse fields they do not know (an ignored limit would be a lie); readings may grow fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

from vgpu import retired
from vgpu.bounds import BoundedRequest
from vgpu.enums import LeaseChoice, PlacementName
from vgpu.errors import ErrorCode
from vgpu.integrations.claims import Attach, Claim
from vgpu.protocol import building
from vgpu.protocol.hello import Reading, Request
from vgpu.protocol.meters import Advice, GpuMeters, VgpuMeters
from vgpu.protocol.printed import Fields, Line
from vgpu.protocol.tenancy import GetQueue, GetQuota, KnownSpec, SetQuotas
from vgpu.protocol.trace import TraceChunk
from vgpu.protocol.usage import Usage, UserUsage, Why
from vgpu.protocol.versions import (
    CLAIMS_SINCE,
    LEASES_SINCE,
    OWNERS_SINCE,
    PODS_SINCE,
    QUEUE_SINCE,
    RANGES_SINCE,
    REQUEST_IDS_SINCE,
    SLO_SINCE,
    TRIGGERS_SINCE,
    refuse_older,
)
from vgpu.queueing.preempted import Preempted
from vgpu.spec import DurationNs, Memory, Percent, PeriodNs, Triggers, VgpuChanges, VgpuSpec, WindowNs

ModeName = Literal["temporal", "spatial"]
ModeChoice = Literal["auto", "temporal", "spatial"]


Lifetime = Literal["kept", "process"]
RequestId = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]
UnixS = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
TRACE_LEAST_NS: Final = 100_000_000
TRACE_MOST_NS: Final = 300_000_000_000
TraceNs = Annotated[int, Field(ge=TRACE_LEAST_NS, le=TRACE_MOST_NS)]


NO_TRIGGERS: Final = "has no --resume-on and no --resume-at"

# --- requests -----------------------------------------------------------------------------------------------------


def _newer_part(field: str, lease: LeaseChoice | None, default: LeaseChoice | None) -> dict[str, Any]:
    """What a node from before ``LEASES_SINCE`` must not get of ``field``. ``VgpuError`` (version): ``lease`` says more
    than that node would do by default."""
    refuse_older(lease is not default, "has no --lease")
    return {field: {"lease"}}


def _refuse_newer(spec: VgpuSpec | VgpuChanges, version: int) -> None:
    """``VgpuError`` (version): a node of that version does not know a property that is asked for."""
    defaults = type(spec).model_fields
    refuse_older(spec.scales and version < RANGES_SINCE, "knows one size and no bounds (20..60)")
    triggers = spec.resume_on != defaults["resume_on"].default
    refuse_older(triggers and version < TRIGGERS_SINCE, NO_TRIGGERS)
    refuse_older(spec.slo != defaults["slo"].default and version < SLO_SINCE, "has no --slo")


class Create(Request):
    """Make a vGPU → ``VgpuStatus``. ``gpu``: "auto" (by the node's placement), an index, or a UUID (any case, prefix).

    ``request_id``: the asker makes one for each vGPU. If the same user sends it again, the answer is the same vGPU. The
    node removes the vGPU if the link ends before its ``Confirm``. "": there is no confirmation, and the node removes
    the vGPU if the answer cannot be sent. ``lifetime`` "process": the vGPU is removed when the process that asked has
    ended and no process is attached. ``wait`` false: the answer comes with the admission, the rest with ``Await``.

    ``owner_uid``: the user whose vGPU it will be; None: the asker's. Only root may name another user. The node forwards
    the request in that user's name, so a GPU Server does not get this field.

    ``claim``: of the engine that asks. The same claim of the same owner has the same vGPU; ``exists`` if it is to be
    another one than it is. ``attach``: which processes the vGPU admits.

    ``queue_ns``: the most that the request waits in the node's queue where there is no room; None: it does not.

    ``share_gid``: of ``spec.share_group``. The node fills it in, whatever a peer sends. −1: there is none, and the
    message to an older GPU Server leaves the field out.
    """

    op: Literal["create"] = "create"
    spec: VgpuSpec
    gpu: str = "auto"
    share_gid: int = Field(default=-1, ge=-1, lt=1 << 32)
    request_id: RequestId = ""
    lifetime: Lifetime = "kept"
    wait: bool = True
    owner_uid: int | None = Field(default=None, ge=0, lt=1 << 32)
    claim: Claim | None = None
    attach: Attach = "owner"
    queue_ns: DurationNs | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        # The node has defaults for some users: it has to know what was not said.
        fields["spec"] = {name: value for name, value in fields["spec"].items() if name in self.spec.model_fields_set}
        absent = {"share_gid": -1, "owner_uid": None, "claim": None, "attach": "owner", "queue_ns": None}
        if self.claim is not None and self.claim.pods is None:
            fields["claim"].pop("pods")
        return {name: value for name, value in fields.items() if name not in absent or value != absent[name]}

    def said_to(self, version: int) -> dict[str, Any]:
        _refuse_newer(self.spec, version)
        refuse_older(self.owner_uid is not None and version < OWNERS_SINCE, "has no --owner")
        claims = self.claim is not None or self.attach != "owner"
        refuse_older(claims and version < CLAIMS_SINCE, "has no claims and no --attach")
        refuse_older(self.queue_ns is not None and version < QUEUE_SINCE, "has no --wait")
        if version >= REQUEST_IDS_SINCE:
            said = super().said_to(version)
            if self.claim is not None and version < PODS_SINCE:  # that node admits the processes of all pods
                said["claim"].pop("pods", None)
            return said
        newer = {"request_id": True, "lifetime": True, "wait": True}
        return self.model_dump(mode="json", exclude=newer | _newer_part("spec", self.spec.lease, LeaseChoice.AUTO))


class Await(Request):
    """The end of a creation that was asked for with ``wait`` false → ``VgpuStatus``, as ``Create``."""

    op: Literal["await"] = "await"
    request_id: RequestId


class Confirm(Request):
    """The asker has the answer to its ``Create`` with this ``request_id``, and keeps the vGPU → ``Confirmed``."""

    op: Literal["confirm"] = "confirm"
    request_id: RequestId


class Scaling(BoundedRequest):
    """Why the node changes a size by itself, and the sizes that it changes. If the vGPU has other sizes or bounds by
    now, the change is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=building.deferred)

    reason: Line
    sm_percent: Percent | None = None
    memory_bytes: Memory | None = None

    def holds_for(self, spec: VgpuSpec, changes: VgpuChanges) -> bool:
        """Whether ``spec`` still is what the change was made for."""
        sm, memory = changes.sm_percent, changes.memory_bytes
        same_sm = (spec.sm_percent, spec.sm_range_percent) == (self.sm_percent, changes.sm_range_percent)
        same_memory = (spec.memory_bytes, spec.memory_range_bytes) == (self.memory_bytes, changes.memory_range_bytes)
        return (sm is None or same_sm) and (memory is None or same_memory)


class Set(Request):
    """Resize a live vGPU, effective at its next token → ``VgpuStatus``. ``vgpu``: id, prefix of one, or name.
    ``scaling``: the node does it by itself."""

    op: Literal["set"] = "set"
    vgpu: str
    changes: VgpuChanges
    scaling: Scaling | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name != "scaling"}

    def said_to(self, version: int) -> dict[str, Any]:
        _refuse_newer(self.changes, version)
        if version >= LEASES_SINCE:
            return super().said_to(version)
        return self.model_dump(mode="json", exclude=_newer_part("changes", self.changes.lease, None))


class Remove(Request):
    """Remove a vGPU → ``VgpuStatus`` (its last). Refused (in-use) with processes attached, unless ``force``: then the
    next gated call of each fails."""

    op: Literal["remove"] = "remove"
    vgpu: str
    force: bool = False


class Suspend(Request):
    """Suspend the programs of a vGPU, and give their GPU memory to others → ``VgpuStatus``. It takes as long as the
    move of their memory to the host. ``preempted``: the node asks, for a request of higher priority, and resumes the
    vGPU later. The node takes the field out of what a peer sends.

    ``resume_on``, ``resume_at_unix_s``: the first of these triggers resumes the vGPU (``vgpu.protocol.triggers``);
    without one it stays suspended until ``Resume``. Refused (invalid): a port on which none of its processes listens,
    a time that is past. On a suspended vGPU they replace the triggers that it had."""

    op: Literal["suspend"] = "suspend"
    vgpu: str
    preempted: Preempted | None = None
    resume_on: Triggers = ()
    resume_at_unix_s: UnixS | None = None

    def said_to(self, version: int) -> dict[str, Any]:
        if version >= TRIGGERS_SINCE:
            return super().said_to(version)
        refuse_older(bool(self.resume_on) or self.resume_at_unix_s is not None, NO_TRIGGERS)
        newer = {"resume_on", "resume_at_unix_s"}
        if version >= QUEUE_SINCE:
            return self.model_dump(mode="json", exclude=newer)
        refuse_older(self.preempted is not None, "does not know that a vGPU is preempted")
        return self.model_dump(mode="json", exclude={"preempted", *newer})


class Resume(Request):
    """Resume the programs of a vGPU → ``VgpuStatus``."""

    op: Literal["resume"] = "resume"
    vgpu: str


class Migrate(Request):
    """Move a vGPU with its running programs to another GPU of the node → ``VgpuStatus``. ``gpu``: an index, or a UUID.
    A suspended vGPU stays suspended. The same request again finishes a move, wherever it was interrupted."""

    op: Literal["migrate"] = "migrate"
    vgpu: str
    gpu: str


class MigrateIn(Request):
    """GPU Server → GPU Server: a vGPU moves to the receiver → ``Arrival``. The receiver may refuse it as it does a
    ``Create``. The same request has the same answer. ``trial``: the receiver only checks, and changes nothing.
    ``suspended``: by its owner, so it needs no room. ``goes_on``, ``home``, ``programs`` (pid, start): of
    ``gpuserver.core.states.migration``. ``generation``, ``next_epoch``: the last ones of its hooks; a hook accepts only
    larger ones. ``book``: its account. ``gpu_name``: of the GPU that it comes from, ``source``. ``owned_bytes``: the
    memory that it has there; ``excess_bytes``: the part of it beyond its promise. ``origin``: for which process or
    request it was made (``gpuserver.core.admission.origin``). ``preempted``: for which request it was suspended.
    ``standby``: what resumes it by itself (``gpuserver.core.states.standby``)."""

    op: Literal["arrive"] = "arrive"
    vgpu: str
    spec: VgpuSpec
    owner_uid: int
    share_gid: int
    created_unix_ns: int
    expires_unix_ns: int | None
    source: int
    gpu_name: str
    suspended: bool
    goes_on: bool
    home: str
    programs: tuple[tuple[int, int], ...]
    generation: int
    next_epoch: int
    book: dict[str, int] | None
    owned_bytes: int = 0
    excess_bytes: int = 0
    trial: bool = False
    origin: dict[str, Any] | None = None
    preempted: Preempted | None = None
    standby: dict[str, Any] | None = None

    def said_to(self, version: int) -> dict[str, Any]:
        _refuse_newer(self.spec, version)
        if version >= TRIGGERS_SINCE:
            return super().said_to(version)
        # There it stays suspended until a person resumes it.
        if version >= QUEUE_SINCE:
            return self.model_dump(mode="json", exclude={"standby"})
        if version >= REQUEST_IDS_SINCE:
            return self.model_dump(mode="json", exclude={"preempted", "standby"})
        newer = {"origin": True, "preempted": True, "standby": True} | _newer_part(
            "spec", self.spec.lease, LeaseChoice.AUTO
        )
        return self.model_dump(mode="json", exclude=newer)


class List(Request):
    """All vGPUs of the node → ``VgpuList``."""

    op: Literal["list"] = "list"


class Inspect(Request):
    """One vGPU with its processes → ``VgpuDetail``."""

    op: Literal["inspect"] = "inspect"
    vgpu: str


class Processes(Request):
    """Processes attached to one vGPU, or to all ("") → ``ProcessList``."""

    op: Literal["processes"] = "processes"
    vgpu: str = ""


class Gpus(Request):
    """The GPUs of the node → ``GpuList``."""

    op: Literal["gpus"] = "gpus"


class SetGpu(Request):
    """Change a GPU → ``GpuStatus``. ``mode`` only while no process is attached; ``period_ns``: one round of leases;
    ``window_ns``: the most predicted GPU time in flight, from the next lease on; ``draining``: it takes no new vGPUs.
    """

    op: Literal["set-gpu"] = "set-gpu"
    gpu: str
    mode: ModeChoice | None = None
    period_ns: PeriodNs | None = None
    window_ns: WindowNs | None = None
    draining: bool | None = None

    def said_to(self, version: int) -> dict[str, Any]:
        if version >= QUEUE_SINCE:
            return super().said_to(version)
        refuse_older(self.draining is not None, "drains no GPUs")
        return self.model_dump(mode="json", exclude={"draining"})


class Status(Request):
    """The node itself → ``NodeStatus``."""

    op: Literal["status"] = "status"


class Watch(Request):
    """``Notice`` messages until the link closes. ``snapshots``: a ``Snapshot`` every ``interval_ns`` (at least 50 ms).
    ``events``: each ``EventReading`` as it happens. ``vgpus``: only these (empty: all)."""

    op: Literal["watch"] = "watch"
    snapshots: bool = True
    events: bool = False
    interval_ns: int = Field(default=500_000_000, ge=50_000_000, le=3_600_000_000_000)
    vgpus: tuple[str, ...] = ()


class Trace(Request):
    """Record one GPU for ``duration_ns`` (0.1 s to 5 minutes) → ``Notice`` messages with a ``TraceChunk`` each, the
    last one ``done``; then the link ends. ``work`` False: only leases and waits, which need no message to a hook."""

    op: Literal["trace"] = "trace"
    gpu: str
    duration_ns: TraceNs
    work: bool = True


class GetSnapshot(Request):
    """Everything that moves, once → ``Snapshot``."""

    op: Literal["look"] = "look"


class GetMetrics(Request):
    """Everything that is counted, once → ``MetricsSnapshot``."""

    op: Literal["meter"] = "meter"


class Events(Request):
    """What has happened → ``EventList``, oldest first: the last ``most`` since ``since_unix_s`` of the vGPU (id, prefix
    or name; also of one that is gone), or of all (""). ``kinds``: only these (empty: all). Fewer than ``most`` where
    one answer cannot hold them. Each user may read the events of all users, as their vGPUs and processes."""

    op: Literal["events"] = "events"
    vgpu: str = ""
    since_unix_s: float = 0.0
    most: int = Field(default=1000, ge=1, le=2000)
    kinds: tuple[str, ...] = ()


AnyRequest = Annotated[
    Create
    | Await
    | Confirm
    | Set
    | Remove
    | Suspend
    | Resume
    | Migrate
    | List
    | Inspect
    | Processes
    | Gpus
    | SetGpu
    | Status
    | GetSnapshot
    | GetMetrics
    | Events
    | GetQueue
    | GetQuota
    | SetQuotas
    | Usage
    | Why
    | Watch
    | Trace,
    Field(discriminator="op"),
]
REQUESTS: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest, config=ConfigDict(defer_build=building.deferred))


class Forward(Request):
    """Node → GPU Server: ``request`` of the process at the other end of the node's link; its ``uid`` is the kernel's
    word. Or it comes from another GPU Server, and is that server's own. ``asker``: pid and start time of that process,
    of a ``Create``; (0, 0): not known."""

    op: Literal["forward"] = "forward"
    uid: int = Field(ge=0, lt=1 << 32)
    asker: tuple[int, int] = (0, 0)
    request: Annotated[AnyRequest | MigrateIn, Field(discriminator="op")]

    def said_to(self, version: int) -> dict[str, Any]:
        newer = {"asker"} if version < REQUEST_IDS_SINCE else None
        return self.model_dump(mode="json", exclude=newer) | {"request": self.request.said_to(version)}


FORWARDS: TypeAdapter[Forward] = TypeAdapter(Forward)


# --- readings -----------------------------------------------------------------------------------------------------


class Steps(Reading):
    """Decode steps and prefills of a vGPU's programs, those in time and those that were not. They are counted while the
    vGPU has a target for them (``--slo``), since its activity page was made."""

    tpot_attained: int = 0
    tpot_missed: int = 0
    ttft_attained: int = 0
    ttft_missed: int = 0
    tpot_mean_ns: int = 0  # of the last decode steps; 0: none was counted
    ttft_last_ns: int = 0  # of the last prefill


class VgpuStatus(Reading):
    """One vGPU now. Rates and ``*_ratio`` of use cover the last second; totals count from creation."""

    vgpu_id: str  # vgpu- and 8 hex digits: the value of VGPU_ID
    name: Line | None
    gpu_index: int
    gpu_uuid: str
    simulated: bool
    mode: ModeName
    # starting: not yet admitting; swapped: its memory is in the host's; suspended: until it is resumed; idle-suspended:
    # until one of its programs wants the GPU (--idle-suspend); moving: between two GPUs; restarting: its GPU Server is,
    # and the other fields are that server's last ones
    state: Annotated[
        Literal[
            "starting",
            "idle",
            "waiting",
            "running",
            "swapped",
            "suspended",
            "idle-suspended",
            "moving",
            "removing",
            "restarting",
            "failed",
        ],
        BeforeValidator(lambda state: retired.STATES.get(state, state)),
    ]
    reason: Line = ""  # of "failed", and of anything worth a remark
    preempted: Preempted | None = None  # suspended by the node for a request of higher priority
    resume_on: tuple[str, ...] = ()  # while it is suspended: call, tcp:PORT; the first of them resumes it
    resume_at_unix_s: float | None = None  # … or this time
    owner_uid: int
    spec: KnownSpec
    created_unix_s: float
    expires_unix_s: float | None

    guarantee_ratio: float  # of the GPU's time (temporal), or of the time on its SM partition (spatial)
    limit_ratio: float
    sm_percent_granted: float  # spatial: what MPS grants for sm_percent; temporal: 100

    tokens_per_second: float  # leases ended per second
    held_ratio: float  # part of the time a usable lease was held, until drained or returned: what others could not use
    busy_ratio: float  # part of the time with work on the GPU: what the limit caps
    tokens: int
    held_ns: int
    busy_ns: int
    overuse_ns: int  # Σ drained past lease end
    lag_ns: int  # > 0: owed GPU time, if it wants some; < 0: has debt
    throttled: bool  # at its limit, waiting for its bucket to fill
    throttled_ratio: float = 0.0  # part of the last second in which it was
    wants: bool  # a process waits for a token, or holds one and has work
    holds: bool  # a lease is in force now
    open_ended: bool = False  # it holds a lease without an end, and no other has ended lately: no rate shows it
    shares: bool = False  # that is a shared one: other light vGPUs compute at the same time
    light: bool = False  # it needs so little of the GPU's time that it may have a shared lease
    demand_ratio: float = 0.0  # the part of its time in which it needs the GPU; 0: not measured yet
    burst_ns: int = 0  # the GPU time of what it launches between two waits for the GPU
    steps: Steps = Steps()  # of a vGPU with latency targets

    memory_limit_bytes: int
    memory_used_bytes: int  # charged: reserved + committed + implicit
    memory_away_bytes: int = 0  # of that in the host's memory, swapped
    memory_pinned_bytes: int = 0  # of what may be swapped, for so much the host's is pinned
    memory_shared_bytes: int = 0  # of that used, what other processes may have, too; charged to this vGPU alone
    memory_imported_bytes: int = 0  # beside that used: what its processes have of others' shared memory
    memory_reserved_bytes: int  # of allocations in progress
    memory_implicit_bytes: int  # contexts, modules, stacks, as NVML reports them
    memory_peak_bytes: int  # implicit, and the sum of the processes' own peaks
    memory_refusals: int  # allocations refused at the limit
    memory_refused_bytes: int  # size of the last one

    processes: int  # attached now
    launches: int
    broker_pid: int | None
    leaving_to: int | None = None  # the GPU that it is about to belong to, or does already
    environment: dict[str, str]  # for processes, besides the hook: VGPU_ID, and where this node is
    warnings: tuple[str, ...] = ()  # what is not as one would expect just now, in sentences
    window_ns: int = 0  # the most predicted GPU time that one of its processes may have in flight while others want
    waiting_ns: int = 0  # for how long it has wanted a token without having one; 0: it does not
    swaps_out: int = 0  # moves of its memory to the host, since its server started
    swaps_in: int = 0  # and back
    request_id: str = ""  # with which it was asked for
    lifetime: Lifetime = "kept"  # process: it goes with the process that asked for it
    claim: Claim | None = None  # of the engine that asked for it
    attach: Attach = "owner"  # mount: it admits each process that reaches it through a mount
    awaited_pods: tuple[str, ...] = ()  # their processes wait to be admitted, and its claim does not name them
    asker_pid: int | None = None  # that process
    replicas_wanted: int = (
        0  # its demand is beyond its bounds, or beyond what the node's GPUs have left (the node's word)
    )


class ProcessReading(Reading):
    """One process attached to a vGPU. The process itself reports everything but ``pid`` and ``alive``."""

    vgpu_id: str
    gpu_index: int
    slot: int
    pid: int
    command: Line
    alive: bool  # False: died, its memory not yet released by the driver
    wants: bool
    has_work: bool  # submitted, and not yet seen to be drained
    memory_bytes: int  # committed + reserved
    memory_by_kind_bytes: dict[str, int]  # device, managed, vmm, async, array, graph, shared
    memory_implicit_bytes: int  # NVML's figure minus committed, if positive
    memory_driver_bytes: int = 0  # NVML's figure
    memory_drift_bytes: int = 0  # what its ledger has beyond that, if it is much
    memory_away_bytes: int = 0  # of its memory in the host's, swapped
    memory_imported_bytes: int = 0  # other processes' memory that it has; those are charged with it
    memory_peak_bytes: int
    memory_refusals: int
    busy_ns: int
    demand_ratio: float = 0.0  # the part of its time in which it needs the GPU; 0: not measured yet
    burst_ns: int = 0  # the GPU time of what it launches between two waits for the GPU
    overrun_ns: int
    launches: int
    graph_launches: int
    copies: int  # between host and device
    copied_bytes: int
    gate_waits: int
    gate_wait_ns: int
    longest_kernel_ns: int
    sm_planned: int = 0  # SMs that MPS should give it; 0: it is not limited
    sm_count: int = 0  # SMs that it has, by its driver; 0: temporal mode, or not known


class Confirmed(Reading):
    """The vGPU stays."""

    vgpu_id: str


class MigrateOutcome(Reading):
    """A vGPU belongs to another GPU from now on. ``goes_on``: its programs are to be resumed there."""

    goes_on: bool


class Arrival(Reading):
    """A GPU Server has taken a vGPU, or (of a trial) would."""


class VgpuList(Reading):
    vgpus: tuple[VgpuStatus, ...]


class ProcessList(Reading):
    processes: tuple[ProcessReading, ...]
    silent_gpus: tuple[int, ...] = ()  # their servers do not answer: the list lacks their processes


class VgpuDetail(Reading):
    """``vgpuctl inspect``: ``notes`` say in sentences what holds for this vGPU and might surprise."""

    vgpu: VgpuStatus
    processes: tuple[ProcessReading, ...]
    gpu: GpuStatus
    notes: tuple[str, ...]
    advice: Advice | None = None
    mounts: tuple[str, ...] = ()  # of a container with this vGPU, as docker run -v takes them

    @property
    def remarks(self) -> dict[str, tuple[str, ...]]:
        """Sentences for a person by their kind; a kind without news has none."""
        advised = (self.advice.text,) if self.advice is not None and self.advice.text else ()
        return {"warning": self.vgpu.warnings, "note": self.notes, "advice": advised}


class OutsideProcess(Reading):
    """A process on a GPU that is in no vGPU: nothing here limits it. ``uid`` −1, ``command`` "": the server cannot see.
    ``command``: the kernel's name for it, at most fifteen letters."""

    gpu_index: int
    pid: int
    uid: int
    command: Line
    memory_bytes: int


class GpuStatus(Reading):
    """One physical (or simulated) GPU and how it is shared."""

    index: int
    uuid: str
    name: Line
    simulated: bool
    state: Literal["serving", "restarting", "failed"]
    reason: Line = ""
    mode: ModeName
    mode_reason: Line  # why this mode: the default, asked for, or why auto chose it
    draining: bool = False  # it takes no new vGPUs
    period_ns: int  # temporal: one round of leases; spatial: length of a round
    sm_count: int
    total_memory_bytes: int
    used_memory_bytes: int  # as NVML reports, of all processes
    guaranteed_ratio: float  # temporal: Σ of guarantees; spatial: φ, the fullness of the best packing
    guaranteed_memory_bytes: int  # Σ memory limits
    vgpus: int
    processes: int
    held_ratio: float  # Σ over vGPUs, last second; spatial: may exceed 1
    busy_ratio: float
    tokens_per_second: float
    open_ended: bool = False  # that is 0, but not for want of a token: one without an end is held
    server_pid: int | None
    restarts: int
    events_heard: int = 0  # wants, GOs, drains and returns that its scheduler received since the GPU Server began
    window_ns: int = 0  # the most predicted GPU time that a process may have in flight while others want
    mps_pid: int | None = None  # spatial: the MPS daemon, None while there is none
    mps_restarts: int = 0  # daemons that were started because one had died
    mps_reason: Line = ""  # why there is none
    outside: tuple[OutsideProcess, ...] = ()
    host_memory_limit_bytes: int = 0  # the most that what is swapped out may have of the host's
    host_memory_bytes: int = 0  # what has been set aside of that, and touched
    host_memory_used_bytes: int = 0  # by what is swapped out just now
    # Of the whole card; the server samples NVML once a second for all readers; None: the driver does not report it.
    utilization_ratio: float | None = None  # part of the time with a kernel running, over NVML's own last sample
    memory_utilization_ratio: float | None = None  # part of the time with its memory being read or written
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None


class GpuList(Reading):
    gpus: tuple[GpuStatus, ...]


class NodeStatus(Reading):
    """The supervisor and its servers."""

    software: str
    pid: int
    uptime_ns: int
    simulated: bool
    runtime_dir: str
    state_dir: str
    gpus: tuple[GpuStatus, ...]
    vgpus: int
    processes: int
    placement: PlacementName = PlacementName.SPREAD  # of --gpu auto


class Snapshot(Reading):
    """Everything that moves, at one instant."""

    at_unix_s: float
    gpus: tuple[GpuStatus, ...]
    vgpus: tuple[VgpuStatus, ...]


class MetricsSnapshot(Reading):
    """Everything that is counted, at one instant, as an exporter of metrics wants it."""

    snapshot: Snapshot
    processes: tuple[ProcessReading, ...]
    gpus: tuple[GpuMeters, ...]
    vgpus: tuple[VgpuMeters, ...]
    users: tuple[UserUsage, ...] = ()
    waiting: int = 0  # requests in the node's queue


class EventReading(Reading):
    """Something that happened. ``kind``: a ``EventType``, or what another version of the node knew."""

    at_unix_s: float
    kind: Annotated[Line, AfterValidator(lambda kind: retired.EVENTS.get(kind, kind))]
    gpu_index: int
    vgpu_id: Line = ""
    text: Line
    fields: Fields = Field(default_factory=dict)


class EventList(Reading):
    events: tuple[EventReading, ...]


# --- envelopes ----------------------------------------------------------------------------------------------------


class Reply(Reading):
    """The answer to request ``id``; ``result`` is the model named at the request."""

    id: int
    ok: Literal[True] = True
    result: dict[str, Any]


class Failure(Reading):
    """Request ``id`` was refused or failed; see ``vgpu.errors``."""

    id: int
    ok: Literal[False] = False
    code: ErrorCode
    error: Line
    hint: Line = ""


class Notice(Reading):
    """One message of the stream that ``Watch`` or ``Trace`` number ``id`` asked for: one of the three is set."""

    id: int
    snapshot: Snapshot | None = None
    event: EventReading | None = None
    trace: TraceChunk | None = None
