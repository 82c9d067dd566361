"""Messages between a GPU Server and the brokers of its vGPUs, and between a broker and the hooks.

Server and broker trust each other: same software, same user. A hook's ``Attach`` comes from a tenant, and is checked.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from vgpu.bounds import Bounded
from vgpu.protocol.printed import CommandName, Line

HOOK_VERSION: Final = 1
OBSERVER_SLOT: Final = -1


class Message(Bounded):
    """``since``: the protocol version (hello.py) that introduced it. An end of an older version closes the link on
    which it arrives."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    since: ClassVar[int] = 1


# --- hook → broker ------------------------------------------------------------------------------------------------


class Attach(Message):
    """A process asks to attach. ``slot``: −1 for a new process; a re-attaching process names the slot it holds.
    ``now_ns``: its CLOCK_MONOTONIC, by which the broker detects a time namespace. ``command``: argv[0], for people.
    ``vgpus``: its VGPU_ID, if that lists several. ``counts``: its hook counts the GPU time that it uses. Hooks of the
    first release do not."""

    op: Literal["attach"] = "attach"
    version: int
    role: Literal["process", "observer"] = "process"
    command: CommandName = Field(default="", max_length=4096)
    now_ns: int = 0
    slot: int = Field(default=-1, ge=-1, lt=64)
    vgpus: str = Field(default="", max_length=256)
    counts: bool = False


class Admitted(Message):
    """Travels with two descriptors: the grants page (read-only) and the activity page. For a process of a swapped vGPU
    it travels with a third, the store."""

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
    """Epoch of the broker that answers. If the activity page has another one, the hook asks again."""


class Refused(Message):
    """The hook prints ``error`` as it stands: one line, what is wrong and what to do."""

    ok: Literal[False] = False
    code: Literal["not-yours", "full", "removed", "version", "mode", "protocol", "unavailable"]
    error: Line


# --- broker → server ----------------------------------------------------------------------------------------------


class Listening(Message):
    """The socket for processes is open."""

    op: Literal["listening"] = "listening"


class Attached(Message):
    """``vgpus``: all that the process has, sorted, if there are several and the vGPU is among them. ``sm_planned``,
    ``memory_planned_bytes``: the limits that MPS got for the process when it started, for its life; 0: no limit, or not
    known any more. ``mps_client_priority``: likewise; "" is not known. ``uid``: of the process when it attached, from
    the kernel; −1: not known. ``alive``: False in a list, for a process that has died and still has its slot.
    ``counts``: as of ``Attach``."""

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
    """First message after hello. ``holds_page``: the message carries the activity page of a vGPU that outlived its
    server, and the store if it has one. ``processes``: all that have a slot in that page; None: the broker is of an
    older release, and reports them one by one."""

    op: Literal["register"] = "register"
    vgpu_id: str
    holds_page: bool
    processes: tuple[Attached, ...] | None = None


class Died(Message):
    """A process of the vGPU has died. Its memory stays charged until the server answers ``Gone``. After a reconnection
    the broker repeats each ``Died`` that is still unanswered."""

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
    """A process of the vGPU has a new context, which is not charged yet: the server is to read NVML."""

    since: ClassVar[int] = 2
    op: Literal["look"] = "look"


class Awaits(Message):
    """Processes of these pods wait at the broker, and the vGPU's claim does not name the pods. They wait for a while,
    since the claim may have changed: the engine that knows it can name them. Each such message has all of them."""

    since: ClassVar[int] = 5
    op: Literal["awaits"] = "awaits"
    pods: tuple[str, ...]


class Starting(Message):
    """So many new processes wait at the broker of a suspended vGPU until it is resumed. Each such message has all of
    them."""

    since: ClassVar[int] = 7
    op: Literal["starting"] = "starting"
    processes: int


class Closed(Message):
    """The broker closed a hook's link, for a reason that the operator should know. ``foreign``: the process is in no
    pod of the vGPU's claim."""

    op: Literal["closed"] = "closed"
    pid: int
    uid: int
    reason: Line
    foreign: bool = False


FromBroker = Annotated[
    Register | Listening | Attached | Died | Reaped | Look | Awaits | Starting | Closed, Field(discriminator="op")
]
FROM_BROKER: TypeAdapter[FromBroker] = TypeAdapter(FromBroker)


# --- server → broker ----------------------------------------------------------------------------------------------


class Adopt(Message):
    """What a broker needs to serve its vGPU. The server sends it at registration and whenever something of it changes.

    At registration three descriptors travel along: grants page (read-only), activity page, relay page. If the vGPU is
    swapped, a fourth does: its owner's store.
    ``key``: the vGPU's entry in the relay page. ``share_gid``: group that may attach besides the owner, −1: none.
    ``sm_planned``, ``memory_planned_bytes``: the limits of its processes in MPS, 0: none. ``most_processes``: of all
    vGPUs of the GPU together, 0: no limit. ``suspended``: the broker admits no new process. ``wakes``:
    a new process resumes the suspended vGPU, and waits for that.
    ``processes``: all that have a slot of the page, for a broker that has just begun; what the page itself says of
    slots, a tenant may have written. ``returning``: processes of a page that is lost, from the journal; they may come
    back. ``places``: of the ``most_processes``, those that are kept for each vGPU of the GPU (key, count).
    ``mount_door``: path of a second socket, which containers have mounted and where each user may attach; "": none.
    ``pods``: uids of the pods whose processes may attach there; None: each process may.
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
    wakes: bool = False
    processes: tuple[Attached, ...] = ()
    returning: tuple[Attached, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    mount_door: str = ""
    pods: tuple[str, ...] | None = None


class Noted(Message):
    """The server has the process in its list. From now on another broker of the vGPU would know the process."""

    since: ClassVar[int] = 3
    op: Literal["noted"] = "noted"
    slot: int
    pid: int
    start_time: int


class Gone(Message):
    """The driver shows the process no more, so its memory is free. The broker is to release its slot. ``keeps_shared``:
    other processes have memory that it shared. That stays charged, and the slot stays dead until the next ``Gone``. A
    broker of an older release gives back all of it."""

    op: Literal["gone"] = "gone"
    slot: int
    pid: int
    start_time: int
    keeps_shared: bool = False


class Stop(Message):
    """The broker is to end. ``removed``: the vGPU exists no more. Otherwise the node stops, and a broker with processes
    stays for them."""

    op: Literal["stop"] = "stop"
    removed: bool


ToBroker = Annotated[Adopt | Noted | Gone | Stop, Field(discriminator="op")]
TO_BROKER: TypeAdapter[ToBroker] = TypeAdapter(ToBroker)
