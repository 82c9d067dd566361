"""``ControlLink``: the blocking end of the control link, for programs that ask one thing and leave (``vgpuctl``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from vgpu import paths
from vgpu.errors import ErrorCode, VgpuError
from vgpu.paths import NodePaths
from vgpu.protocol.codec import MAX_ANSWER_BYTES, Decoder, Message, encode
from vgpu.protocol.descriptors import refuse_descriptors
from vgpu.protocol.hello import PROTOCOL_VERSION, Hello, Request, Welcome
from vgpu.protocol.messages import (
    REQUEST_IDS_SINCE,
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
from vgpu.protocol.trace import TraceChunk
from vgpu.spec import VgpuChanges, VgpuSpec, explain
from vgpu.trust import listener_uid, replaceable_part, trusts

PATIENT_S: Final = 60.0
"""For the handshake of a link on which a change is asked for: on a busy machine a node may take its time."""
Result = TypeVar("Result", bound=BaseModel)

_OWN_NODE = "set VGPU_RUNTIME_DIR to where your node, or root's, runs"


def client_socket() -> Path:
    """The socket for this user's requests: of the node that the environment names. Else of the user's own node, if one
    listens. Else of the system's node, if there is one."""
    own = NodePaths.from_environment().control_socket
    system = paths.SYSTEM_RUNTIME / own.name
    if os.environ.get("VGPU_RUNTIME_DIR") or own == system or listens(own) or not system.exists():
        return own
    return system


def listens(path: Path) -> bool:
    """Whether a process listens at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(False)
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # its backlog is full, or it is another user's: the later request reports the reason
            return True
    return True


class ControlLink:
    """A link to the node with its control socket at ``path``.

    Use it as a context manager. Every method raises ``VgpuError`` with the node's own reason, or with ``unreachable``,
    ``timeout``, ``version``, ``protocol`` of this end. Not for several threads at once.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = 10.0) -> None:
        """Connects and shakes hands. ``path``: by default the environment's node; ``timeout_s`` bounds each answer."""
        self._path = client_socket() if path is None else path
        self._decoder = Decoder(MAX_ANSWER_BYTES)
        self._next_id = 0
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        refuse_descriptors(self._socket)
        self._socket.settimeout(timeout_s)
        try:
            self._connect()
            self.welcome = self._ask(Hello(), Welcome)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Call it from another thread than the one that waits for an answer, which gets ``unreachable``. Then close."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- what can be asked

    def create(
        self,
        spec: VgpuSpec,
        gpu: str = "auto",
        *,
        lifetime: Lifetime = "kept",
        request_id: str = "",
        confirm: bool = True,
    ) -> VgpuStatus:
        """A new vGPU, already admitting processes. ``no-room`` names the largest that would fit.

        ``lifetime`` "process": the node removes the vGPU once this process has ended and no process is attached.
        ``request_id``: the same one again has the same vGPU as its answer; "": this method makes one. ``confirm``
        false: the caller calls ``confirm`` once the answer is where it is needed. Without that, the node removes the
        vGPU when this link ends.
        """
        request = Create(spec=spec, gpu=gpu, lifetime=lifetime, request_id=request_id or uuid4().hex)
        vgpu = self._ask_at_leisure(request, VgpuStatus)
        if confirm:
            self.confirm(vgpu)
        return vgpu

    def confirm(self, vgpu: VgpuStatus) -> None:
        """The answer to ``create`` has arrived: the vGPU stays. ``not-found``: it is gone."""
        if vgpu.request_id and self.welcome.version >= REQUEST_IDS_SINCE:
            self._ask_at_leisure(Confirm(request_id=vgpu.request_id), Confirmed)

    def set(self, vgpu: str, changes: VgpuChanges) -> VgpuStatus:
        return self._ask_at_leisure(Set(vgpu=vgpu, changes=changes), VgpuStatus)

    def remove(self, vgpu: str, *, force: bool = False) -> VgpuStatus:
        """The last reading of the removed vGPU."""
        return self._ask_at_leisure(Remove(vgpu=vgpu, force=force), VgpuStatus)

    def suspend(self, vgpu: str) -> VgpuStatus:
        """``mode``, ``in-use`` or ``unavailable``: its programs go on."""
        return self._ask_at_leisure(Suspend(vgpu=vgpu), VgpuStatus)

    def resume(self, vgpu: str) -> VgpuStatus:
        """``no-room`` or ``unavailable``: it stays suspended."""
        return self._ask_at_leisure(Resume(vgpu=vgpu), VgpuStatus)

    def migrate(self, vgpu: str, gpu: str) -> VgpuStatus:
        """``no-room``, ``mode``, ``in-use`` or ``unavailable``: the programs go on where they were, unless the message
        says that the vGPU is on the other GPU."""
        return self._ask_at_leisure(Migrate(vgpu=vgpu, gpu=gpu), VgpuStatus)

    def _ask_at_leisure(self, request: Request, model: type[Result]) -> Result:
        """A change: the node bounds it, and this end waits for as long as the node is there."""
        self._socket.settimeout(None)
        try:
            return self._ask(request, model)
        finally:
            self._socket.settimeout(self._timeout_s)

    def list(self) -> tuple[VgpuStatus, ...]:
        return self._ask(List(), VgpuList).vgpus

    def inspect(self, vgpu: str) -> VgpuDetail:
        return self._ask(Inspect(vgpu=vgpu), VgpuDetail)

    def processes(self, vgpu: str = "") -> ProcessList:
        return self._ask(Processes(vgpu=vgpu), ProcessList)

    def gpus(self) -> tuple[GpuStatus, ...]:
        return self._ask(Gpus(), GpuList).gpus

    def set_gpu(
        self, gpu: str, *, mode: ModeChoice | None = None, period_ns: int | None = None, window_ns: int | None = None
    ) -> GpuStatus:
        return self._ask_at_leisure(SetGpu(gpu=gpu, mode=mode, period_ns=period_ns, window_ns=window_ns), GpuStatus)

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

    def _connect(self) -> None:
        """Connect only to a node of this user or root. Reason: another user that answers in the node's place would
        learn the requests, and this end would believe its answers."""
        part = replaceable_part(self._path.parent)
        if part is not None and not self._is_roots_choice():
            text = f"another user can replace the node at {self._path}: {part} is theirs, or open to all"
            raise VgpuError(ErrorCode.NOT_YOURS, text, _OWN_NODE)
        try:
            self._socket.connect(str(self._path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise VgpuError(
                ErrorCode.UNREACHABLE, f"no node answers at {self._path}", "start one with: vgpuctl serve --detach"
            ) from error
        except PermissionError as error:
            raise VgpuError(
                ErrorCode.NOT_YOURS, f"{self._path} belongs to another user's node", "set VGPU_RUNTIME_DIR to your own"
            ) from error
        except OSError as error:
            raise VgpuError(ErrorCode.UNREACHABLE, f"cannot reach {self._path}: {error.strerror or error}") from error
        uid = listener_uid(self._socket)
        if not trusts(uid) and not self._is_roots_choice():
            raise VgpuError(ErrorCode.NOT_YOURS, f"uid {uid} answers at {self._path}, not this user or root", _OWN_NODE)

    def _is_roots_choice(self) -> bool:
        """Root may ask any user's node, but only one that it names."""
        return os.geteuid() == 0 and bool(os.environ.get("VGPU_RUNTIME_DIR"))

    def _fresh_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _ask(self, request: Request, model: type[Result]) -> Result:
        numbered = request.model_copy(update={"id": self._fresh_id()})
        self._send(numbered)
        return _valid(model, self._checked(self._receive(), numbered.id))

    def _send(self, request: Request) -> None:
        try:
            version = PROTOCOL_VERSION if isinstance(request, Hello) else self.welcome.version
            self._socket.sendall(encode(request.said_to(version)))
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            self._raise_last_word()
            text = f"the node closed the link: {error.strerror}"
            raise VgpuError(ErrorCode.UNREACHABLE, text, "does it still run? vgpuctl status") from error

    def _raise_last_word(self) -> None:
        """Raise the node's reason, if it sent one. A node that refuses a link sends the reason and closes the link,
        perhaps before this end has sent its request."""
        message: Message = {}
        with suppress(VgpuError):
            message = self._receive()
        if message.get("ok") is False:
            self._checked(message, 0)

    def _receive(self) -> Message:
        while (message := self._decoder.next()) is None:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise VgpuError(ErrorCode.UNREACHABLE, f"the link to the node broke: {error.strerror}") from error
            if not data:
                raise VgpuError(ErrorCode.UNREACHABLE, "the node closed the link", "does it still run? vgpuctl status")
            self._decoder.feed(data)
        return message

    def _late(self) -> VgpuError:
        return VgpuError(
            ErrorCode.TIMEOUT, f"the node at {self._path} did not answer within {self._timeout_s:g} s", "vgpuctl status"
        )

    def _checked(self, message: Message, request_id: int) -> Message:
        if message.get("ok") is False:
            code = message.get("code")
            known = ErrorCode(code) if code in list(ErrorCode) else ErrorCode.INTERNAL
            raise VgpuError(known, str(message.get("error", "refused without a reason")), str(message.get("hint", "")))
        result = message.get("result")
        if message.get("id") != request_id or not isinstance(result, dict):
            raise VgpuError(ErrorCode.PROTOCOL, f"the node answered something else than request {request_id}")
        return result


def _valid(model: type[Result], message: Message) -> Result:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        raise VgpuError(
            ErrorCode.VERSION, f"the node's answer is not understood: {explain(error)}", "update st-vgpu on both ends"
        ) from error
