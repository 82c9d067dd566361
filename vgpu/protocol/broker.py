"""Messages between a GPU Server and the brokers of its vGPUs, and between a broker and the hooks.

Server and broker trust each other: same software, same user. A hook's ``Attach`` is a tenant's word.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from vgpu.bounds import Bounded
from vgpu.protocol.printed import CommandName, Line

HOOK_VERSION: Final = 1
OBSERVER_SLOT: Final = -1


class Message(Bounded):
    """``since``: the protocol version (hello.py) that has it. Ends of an older one close the link that it comes by."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    since: ClassVar[int] = 1


# --- hook → broker ------------------------------------------------------------------------------------------------


class Attach(Message):
    """A process wants in. ``slot``: −1 for a new process; a re-attaching one names the slot it holds. ``now_ns``: its
    CLOCK_MONOTONIC, to notice a time namespace. ``command``: argv[0], for people. ``vgpus``: its VGPU_ID, if that lists
    several. ``counts``: its hook counts the GPU time that it uses, which hooks of the first release do not."""

    op: Literal["attach"] = "attach"
    version: int
    role: Literal["process", "observer"] = "process"
    command: CommandName = Field(default="", max_length=4096)
    now_ns: int = 0
    slot: int = Field(default=-1, ge=-1, lt=64)
    vgpus: str = Field(default="", max_length=256)
    counts: bool = False


class Admitted(Message):
    """Travels with two descriptors: the grants page (read-only) and the activity page. With a third, the store, for a
    process of a vGPU that is swapped."""

    ok: Literal[True] = True
    slot: int
    now_ns: int
    mode: Literal["temporal", "spatial"]
    generation: int
    gpu_index: int
    gpu_uuid: str
    vgpu_id: str
    simulated: bool
    sm_percent: float
    mps_pipe_directory: str
    mps_log_directory: str
    mps_active_thread_percentage: str
    mps_pinned_memory_limit: str
    mps_client_priority: str
    broker_epoch: int = 0
    """Of the broker that answers, as the activity page has it: with another one in the page, a hook asks again."""


class Refused(Message):
    """``error`` is printed by the hook as it stands: one line, what is wrong and what to do."""

    ok: Literal[False] = False
    code: Literal["not-yours", "full", "removed", "version", "mode", "protocol", "unavailable"]
    error: Line


# --- broker → server ----------------------------------------------------------------------------------------------


class Listening(Message):
    """The socket for processes is open."""

    op: Literal["listening"] = "listening"


class Attached(Message):
    """``vgpus``: all that the process has, sorted, if there are several and the vGPU is among them. ``sm_planned``,
    ``memory_planned_bytes``: what MPS was told to hold it to when it started, for its life; 0: to nothing, or nobody
    knows any more. So with ``mps_client_priority``: "" is not known. ``uid``: by which the kernel knew it when it
    attached, −1: not known. ``alive``: False in a list, for one that has died and has its slot still. ``counts``: as of
    ``Attach``."""

    op: Literal["attached"] = "attached"
    slot: int
    pid: int
    start_time: int
    command: CommandName
    vgpus: tuple[str, ...] = ()
    sm_planned: int = 0
    memory_planned_bytes: int = 0
    mps_client_priority: str = ""
    uid: int = -1
    alive: bool = True
    counts: bool = False


class Register(Message):
    """First message after hello. ``holds_page``: the activity page of a vGPU that outlived its server comes along,
    and the store if it has one. ``processes``: all that have a slot in that page; None: a broker of an older release,
    which reports them one by one."""

    op: Literal["register"] = "register"
    vgpu_id: str
    holds_page: bool
    processes: tuple[Attached, ...] | None = None


class Died(Message):
    """A process of the vGPU is gone; its memory stays charged until the server answers ``Gone``. Repeated after a
    reconnection for everything still unanswered."""

    op: Literal["died"] = "died"
    slot: int
    pid: int
    start_time: int


class Reaped(Message):
    """The slot is free again. ``released_bytes``: what its process was charged."""

    op: Literal["reaped"] = "reaped"
    slot: int
    pid: int
    released_bytes: int


class Look(Message):
    """A process of the vGPU has a new context, which is not charged yet: NVML shows it."""

    since: ClassVar[int] = 2
    op: Literal["look"] = "look"


class Closed(Message):
    """A hook's link was closed for a reason worth telling the operator."""

    op: Literal["closed"] = "closed"
    pid: int
    uid: int
    reason: Line


FromBroker = Annotated[Register | Listening | Attached | Died | Reaped | Look | Closed, Field(discriminator="op")]
FROM_BROKER: TypeAdapter[FromBroker] = TypeAdapter(FromBroker)


# --- server → broker ----------------------------------------------------------------------------------------------


class Adopt(Message):
    """What a broker needs to serve its vGPU; sent at registration and whenever something of it changes.

    At registration three descriptors travel along: grants page (read-only), activity page, relay page; and a fourth if
    the vGPU is swapped: its owner's store.
    ``key``: the vGPU's entry in the relay page. ``share_gid``: group that may attach besides the owner, −1: none.
    ``sm_planned``, ``memory_planned_bytes``: to what MPS holds its processes, 0: to nothing. ``most_processes``: of all
    vGPUs of the GPU together, 0: as many as they like. ``suspended``: nobody new is let in.
    ``processes``: all that have a slot of the page, for a broker that has just begun; what the page itself says of that
    is a tenant's word. ``returning``: those that were in a page that is lost, by the journal: they may come back.
    ``places``: of the ``most_processes``, those that are kept for each vGPU of the GPU (key, count).
    """

    op: Literal["adopt"] = "adopt"
    vgpu_id: str
    key: int
    generation: int
    owner_uid: int
    share_gid: int
    mode: Literal["temporal", "spatial"]
    gpu_index: int
    gpu_uuid: str
    simulated: bool
    sm_percent: float
    mps_pipe_directory: str = ""
    mps_log_directory: str = ""
    mps_active_thread_percentage: str = ""
    mps_pinned_memory_limit: str = ""
    mps_client_priority: str = ""
    sm_planned: int = 0
    memory_planned_bytes: int = 0
    most_processes: int = 0
    suspended: bool = False
    processes: tuple[Attached, ...] = ()
    returning: tuple[Attached, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


class Noted(Message):
    """The server has the process in its list: from now on another broker of the vGPU would know it."""

    since: ClassVar[int] = 3
    op: Literal["noted"] = "noted"
    slot: int
    pid: int
    start_time: int


class Gone(Message):
    """The driver shows the process no more: its memory is free, release its slot."""

    op: Literal["gone"] = "gone"
    slot: int
    pid: int
    start_time: int


class Stop(Message):
    """Leave. ``removed``: the vGPU exists no more; else the node stops, and a broker with processes stays for them."""

    op: Literal["stop"] = "stop"
    removed: bool


ToBroker = Annotated[Adopt | Noted | Gone | Stop, Field(discriminator="op")]
TO_BROKER: TypeAdapter[ToBroker] = TypeAdapter(ToBroker)
