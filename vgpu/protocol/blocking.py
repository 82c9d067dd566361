"""``BlockingLink``: the blocking end of a link to a node, which sends and receives plain messages.

This module does not import pydantic, so that a small client need not wait for that import. Only a node of this user or
of root is trusted.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from client_hook import driver
from vgpu import paths
from vgpu.errors import ErrorCode, VgpuError
from vgpu.paths import NodePaths
from vgpu.protocol.codec import MAX_ANSWER_BYTES, Decoder, Message, encode
from vgpu.protocol.descriptors import refuse_descriptors
from vgpu.trust import listener_uid, replaceable_part, trusts

PATIENT_S: Final = 60.0
"""For the handshake of a link on which a change is asked for: on a busy machine a node may take its time."""
_OWN_NODE: Final = "set VGPU_RUNTIME_DIR to where your node, or root's, runs"


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


class BlockingLink:
    """A link to the node with its control socket at ``path``, before any message.

    Use it as a context manager. Every method raises ``VgpuError`` with the node's own reason, or with ``unreachable``,
    ``timeout``, ``protocol`` of this end. Not for several threads at once.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = 10.0) -> None:
        """Connects. ``path``: by default the environment's node; ``timeout_s`` bounds each answer."""
        self._path = client_socket() if path is None else path
        self._decoder = Decoder(MAX_ANSWER_BYTES)
        self._next_id = 0
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        refuse_descriptors(self._socket)
        self._socket.settimeout(timeout_s)
        try:
            self._connect()
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
            hint = f"start one with: {driver.command_for_a_node()}"
            raise VgpuError(ErrorCode.UNREACHABLE, f"no node answers at {self._path}", hint) from error
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

    def _send_message(self, message: Message) -> None:
        try:
            self._socket.sendall(encode(message))
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
