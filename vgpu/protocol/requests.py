"""The table of requests: ``messages`` has their fields, and this table has what happens to each of them.

``vgpuctl`` takes from it which requests have no time limit. The node and the GPU Servers take from it which requests
they answer themselves, and how long the node waits for a server. The HTTP API takes from it how long it waits, and
``tests/protocol/test_requests.py`` holds its routes against it. A new request is a line here, its message in
``messages``, and a handler in ``node/control.py`` or ``gpuserver/runtime/api/control.py``, as ``route`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from pydantic import BaseModel

from vgpu.protocol.hello import Request
from vgpu.protocol.messages import (
    Arrival,
    Await,
    Confirm,
    Confirmed,
    Create,
    EventList,
    Events,
    GetMetrics,
    GetSnapshot,
    GpuList,
    Gpus,
    GpuStatus,
    Inspect,
    List,
    MetricsSnapshot,
    Migrate,
    MigrateIn,
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
from vgpu.protocol.tenancy import GetQueue, GetQuota, QueueList, QuotaReading, QuotasSet, SetQuotas
from vgpu.protocol.usage import Usage, UsageReport, Why, WhyReport


class Route(Enum):
    """Which process answers a request of a client: the node (``node/control.py``), or a GPU Server
    (``gpuserver/runtime/api/control.py``)."""

    NODE = "the node"
    """The node decides. It may send requests to GPU Servers meanwhile."""
    VGPU = "the GPU Server of the vGPU"
    """The node finds the vGPU that the field ``vgpu`` names, and passes the request on."""
    GPU = "the GPU Server of the GPU"
    """The node finds the GPU that the field ``gpu`` names, and passes the request on."""
    SERVER = "a GPU Server"
    """Only the node or another GPU Server sends it. No client may."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What holds for every request of one kind.

    ``answer``: the model of the answer; ``Notice`` for a stream. ``limit_s``: how long the node waits for a GPU
    Server's answer, in seconds. ``changes``: a client waits for it as long as the node is there; else the client has a
    time limit of its own. ``on_server``: a GPU Server answers the request, too, when the node sends it. ``http``:
    method and path below ``/api/v1``; "": HTTP has another form of it, or none.
    """

    request: type[Request]
    answer: type[BaseModel]
    route: Route
    limit_s: float
    changes: bool = False
    on_server: bool = True
    http: str = ""

    @property
    def op(self) -> str:
        """The request's name on the wire."""
        return str(self.request.model_fields["op"].default)

    @property
    def is_stream(self) -> bool:
        return self.answer is Notice

    def target(self, request: Request) -> str:
        """What the request names: a vGPU, or for ``Route.GPU`` a GPU. The other routes have no such field."""
        return str(getattr(request, "gpu" if self.route is Route.GPU else "vgpu"))


READING_S: Final = 5.0
CHANGE_S: Final = 60.0
"""The only time limit of a change. The node applies it, and a client waits for as long as the node is there."""
MOVE_S: Final = 600.0
"""As long as the driver takes to copy the memory of a whole card, and the host to find room for it."""

TABLE: Final = (
    Entry(Create, VgpuStatus, Route.NODE, CHANGE_S, changes=True, http="POST /vgpus"),
    Entry(Confirm, Confirmed, Route.NODE, CHANGE_S, changes=True),
    Entry(Set, VgpuStatus, Route.VGPU, CHANGE_S, changes=True, http="PATCH /vgpus/{ref}"),
    Entry(Remove, VgpuStatus, Route.VGPU, CHANGE_S, changes=True, http="DELETE /vgpus/{ref}"),
    Entry(Suspend, VgpuStatus, Route.VGPU, MOVE_S, changes=True, http="POST /vgpus/{ref}/suspend"),
    Entry(Resume, VgpuStatus, Route.VGPU, MOVE_S, changes=True, http="POST /vgpus/{ref}/resume"),
    Entry(Migrate, VgpuStatus, Route.NODE, MOVE_S, changes=True, http="POST /vgpus/{ref}/migrate"),
    Entry(SetGpu, GpuStatus, Route.GPU, CHANGE_S, changes=True, http="PATCH /gpus/{gpu}"),
    Entry(List, VgpuList, Route.NODE, READING_S, http="GET /vgpus"),
    Entry(Inspect, VgpuDetail, Route.VGPU, CHANGE_S, http="GET /vgpus/{ref}"),
    Entry(Processes, ProcessList, Route.NODE, READING_S, http="GET /processes"),
    Entry(Gpus, GpuList, Route.NODE, READING_S, http="GET /gpus"),
    Entry(Status, NodeStatus, Route.NODE, READING_S, on_server=False, http="GET /status"),
    Entry(GetSnapshot, Snapshot, Route.NODE, READING_S, http="GET /snapshot"),
    Entry(GetMetrics, MetricsSnapshot, Route.NODE, READING_S),
    Entry(Events, EventList, Route.NODE, READING_S, http="GET /events"),
    Entry(GetQueue, QueueList, Route.NODE, READING_S, on_server=False, http="GET /queue"),
    Entry(GetQuota, QuotaReading, Route.NODE, READING_S, on_server=False, http="GET /quota"),
    Entry(SetQuotas, QuotasSet, Route.NODE, READING_S, on_server=False),
    Entry(Usage, UsageReport, Route.NODE, READING_S, on_server=False, http="GET /usage"),
    Entry(Why, WhyReport, Route.NODE, READING_S, on_server=False, http="GET /vgpus/{ref}/why"),
    Entry(Watch, Notice, Route.NODE, READING_S),
    Entry(Trace, Notice, Route.NODE, READING_S),
    Entry(Await, VgpuStatus, Route.SERVER, CHANGE_S),
    Entry(MigrateIn, Arrival, Route.SERVER, MOVE_S),
)
ENTRY_OF: Final = {entry.request: entry for entry in TABLE}


def entry_of(request: Request) -> Entry:
    return ENTRY_OF[type(request)]
