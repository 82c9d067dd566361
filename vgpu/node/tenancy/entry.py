"""One request of the queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from vgpu.errors import VgpuError
from vgpu.identity import Process
from vgpu.node.creation import Creation
from vgpu.node.tenancy.figures import parts
from vgpu.node.tenancy.places import Place
from vgpu.placement.box import request
from vgpu.placement.state import Request
from vgpu.protocol.messages import Create, GpuStatus
from vgpu.queueing.order import User
from vgpu.quotas.quota import Allowance
from vgpu.spec import VgpuSpec


@dataclass(slots=True, eq=False)
class Entry:
    """One request that waits. ``creation`` or ``error`` is there when ``done`` is set."""

    request: Create
    spec: VgpuSpec
    allowance: Allowance
    owner_uid: int
    asker: Process
    user: User
    since_unix_s: float
    done: trio.Event = field(default_factory=trio.Event)
    creation: Creation | None = None
    error: VgpuError | None = None
    left: bool = False
    reason: str = ""
    kind: str = ""
    """Requests of the same kind have room on the same GPUs."""
    blocked: str = ""
    """Why its user's quota keeps it out now."""
    judged: tuple[object, ...] = ()
    """That by which ``blocked`` was found."""

    asks: dict[int, Request] = field(default_factory=dict)
    """What it asks of a GPU, by the memory of the GPU."""

    def __post_init__(self) -> None:
        self.kind = self.spec.model_dump_json(exclude={"name", "ttl_ns"})

    def asks_of(self, gpu: GpuStatus) -> Request:
        found = self.asks.get(gpu.total_memory_bytes)
        if found is None:
            found = self.asks[gpu.total_memory_bytes] = request(self.spec, gpu)
        return found

    def sizes(self, gpus: Iterable[GpuStatus]) -> dict[int, float]:
        """By GPU, the part of the scarcer of time and memory that the vGPU takes. A GPU with too little memory is left
        out."""
        return parts((gpu, self.asks_of(gpu)) for gpu in gpus)

    @property
    def place(self) -> Place:
        return self.request.request_id, self.owner_uid

    @property
    def key(self) -> str:
        """Two users may choose the same request id."""
        return f"{self.owner_uid}/{self.request.request_id}"

    @property
    def claim(self) -> str:
        return "" if self.request.claim is None else self.request.claim.kind

    def end(self, creation: Creation | None, error: VgpuError | None = None) -> None:
        """The first end counts. The GPU Server takes a later creation back."""
        if self.left or self.done.is_set():
            if creation is not None:
                creation.close()
            return
        self.creation, self.error = creation, error
        self.done.set()
