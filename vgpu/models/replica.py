"""A replica's side: it waits for the owner of a model, imports its memory, and maps it read-only."""

from __future__ import annotations

import os
import socket
import time
import warnings
import weakref
from collections.abc import Mapping as Table_
from contextlib import suppress
from pathlib import Path
from typing import Final

from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.models import hashes, places
from vgpu.models.cuda import READ, READ_WRITE, Card, Mapping
from vgpu.models.table import Placed, Table, table_of
from vgpu.protocol.codec import MAX_ANSWER_BYTES, Decoder, Message, ProtocolError, encode
from vgpu.protocol.peer import peer_of

WAIT_S: Final = 60.0
_LOOK_S: Final = 0.1
_ANSWER_S: Final = 30.0
_READ_BYTES: Final = 1 << 16
_open: weakref.WeakSet[Model] = weakref.WeakSet()


class Model:
    """The tensors of a model in this process's address space. The memory stays until ``close``, or until the last
    reference to this object has gone, whether the owner lives or not."""

    def __init__(self, table: Table, mapping: Mapping, link: socket.socket, *, read_only: bool) -> None:
        self.table, self.read_only = table, read_only
        self._mapping, self._link = mapping, link
        self.tensors: Table_[str, Placed] = {tensor.name: tensor for tensor in table.tensors}
        _open.add(self)

    @property
    def ordinal(self) -> int:
        """Of its device in this process."""
        return self._mapping.card.ordinal

    def address(self, tensor: Placed) -> int:
        """On the GPU."""
        return self._mapping.address + tensor.offset

    def read(self, name: str) -> bytes:
        """The bytes of a tensor, copied from the GPU."""
        tensor = self.tensors[name]
        self._mapping.card.enter()
        return bytes(self._mapping.card.read(self.address(tensor), tensor.size_bytes))

    def changed(self) -> list[str]:
        """The tensors whose bytes are not those that the owner loaded. Where no replica can write there are none."""
        if self.read_only and self.table.read_only:
            return []
        if any(tensor.size_bytes and not tensor.digest for tensor in self.table.tensors):
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the owner of {self.table.name} has no hashes of its tensors")
        return hashes.changed(self._mapping, self.table.tensors)

    def close(self) -> None:
        """Idempotent. What still points into the memory, such as a tensor of PyTorch, must not be used afterwards."""
        self._mapping.close()
        self._link.close()


def open_model(name: str, timeout_s: float = WAIT_S) -> Model:
    """Map the model. It waits ``timeout_s`` for an owner that is not there yet, or still loads.

    ``VgpuError``: no owner serves it (not-found), it is still being loaded (timeout), it is on another GPU, ...
    """
    link = connected(name, timeout_s)
    try:
        message, descriptors = asked(link, {"op": "load"})
    except BaseException:
        link.close()
        raise
    try:
        table = table_of(message)
        if len(descriptors) != 1:
            raise ProtocolError(f"the owner of the model sent {len(descriptors)} handles")
        mapping, read_only = imported(Card.of(table.gpu_uuid, name), table, descriptors[0])
    except BaseException:
        link.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    link.setblocking(False)
    return Model(table, mapping, link, read_only=read_only)


def check() -> list[str]:
    """The tensors of all models of this process that a replica has written to. There is nothing to check where the
    driver has read-only access."""
    return [name for model in list(_open) for name in model.changed()]


def connected(name: str, timeout_s: float) -> socket.socket:
    """A link to the owner, which is a process of this user."""
    path = places.socket_of(places.folder(), name)
    until = time.monotonic() + timeout_s
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        link.setblocking(False)  # an owner that stands still accepts nothing, and its queue may be full
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError, BlockingIOError) as error:
            link.close()
            if time.monotonic() >= until:
                raise (
                    VgpuError(
                        ErrorCode.TIMEOUT,
                        f"the owner of the model {name} accepted no connection within {timeout_s:g} s",
                        "vgpuctl models ls; vgpuctl resume, if its vGPU is suspended",
                    )
                    if isinstance(error, BlockingIOError)
                    else nothing_serves(name, path, timeout_s)
                ) from error
            time.sleep(_LOOK_S)
            continue
        except OSError as error:
            link.close()
            raise VgpuError(ErrorCode.NOT_YOURS, f"cannot reach {path}: {error.strerror or error}") from error
        if (uid := peer_of(link).uid) != os.geteuid():
            link.close()
            raise VgpuError(ErrorCode.NOT_YOURS, f"uid {uid} serves the model {name} at {path}, not you")
        return link


def nothing_serves(name: str, path: Path, waited_s: float) -> VgpuError:
    """Its lock says which process is about to."""
    import fcntl

    with suppress(OSError, ValueError), places.lock_of(path.parent, name).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return VgpuError(
                ErrorCode.TIMEOUT,
                f"process {int(lock.read())} still loads the model {name}, after {waited_s:g} s",
                "give a longer timeout_s",
            )
    return VgpuError(
        ErrorCode.NOT_FOUND,
        f"no process serves the model {name}: none came within {waited_s:g} s",
        f"vgpuctl models serve {name} FILE... in a vGPU of yours",
    )


def asked(link: socket.socket, request: Message) -> tuple[Message, list[int]]:
    """The owner's answer with its descriptors, which are the caller's. ``VgpuError``: its refusal."""
    link.settimeout(_ANSWER_S)
    decoder, descriptors = Decoder(MAX_ANSWER_BYTES), []
    try:
        link.sendall(encode(request))
        while (message := decoder.next()) is None:
            data, more, _, _ = socket.recv_fds(link, _READ_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
            descriptors += more
            if not data:
                raise VgpuError(ErrorCode.UNREACHABLE, "the owner of the model has ended", "start it again")
            decoder.feed(data)
        if "error" in message:
            raise refused(message)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            reason = "did not answer in time" if isinstance(error, TimeoutError) else "has ended"
            raise VgpuError(ErrorCode.UNREACHABLE, f"the owner of the model {reason}", "start it again") from error
        raise
    return message, descriptors


def refused(message: Message) -> VgpuError:
    try:
        code = ErrorCode(str(message.get("code")))
    except ValueError:
        code = ErrorCode.UNAVAILABLE
    return VgpuError(code, cleaned(str(message["error"])), cleaned(str(message.get("hint", ""))))


def imported(card: Card, table: Table, descriptor: int) -> tuple[Mapping, bool]:
    """The mapping, and whether the driver refuses writes to it."""
    card.enter()
    handle = card.imported(descriptor)
    try:
        mapping = Mapping(card, handle, table.total_bytes)
    finally:
        card.release(handle)
    if mapping.allow(READ):
        return mapping, True
    if not mapping.allow(READ_WRITE):
        raise VgpuError(ErrorCode.UNAVAILABLE, f"the CUDA driver refuses access to the memory of {table.name}")
    warnings.warn(
        f"the driver refuses read-only access: a write into a tensor of {table.name} changes it for all replicas; "
        "vgpu.models.check() finds that",
        stacklevel=3,
    )
    return mapping, False
