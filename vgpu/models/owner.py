"""The owner of a model: it loads the files into one allocation, and gives replicas the handle of it.

It allocates nothing else, and computes nothing. The replicas keep the memory if the owner ends; a later replica gets an
error. Where the driver has no read-only access, the owner compares the bytes with their hashes once a minute.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Final

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import exclusive
from vgpu.models import hashes, places
from vgpu.models.cuda import READ, READ_WRITE, Card, Mapping
from vgpu.models.safetensors import Stored, damaged, read_headers, unreadable
from vgpu.models.table import Placed, Table, check_name, placed
from vgpu.protocol.codec import MAX_ANSWER_BYTES, MAX_CONTROL_BYTES, Message, encode
from vgpu.protocol.peer import peer_of
from vgpu.protocol.stream import LINK_ENDED, MessageStream, check_length, listen, serve_links
from vgpu.units import format_bytes

MOST_REPLICAS: Final = 256
SPARE_LINKS: Final = 16
"""For those that ask for the status, and those that are refused."""
ASK_S: Final = 10.0
"""How long a peer may take to ask."""
CHECK_S: Final = 60.0
"""Between two comparisons of the bytes, where replicas can write."""
_READABLE: Final = mmap.PROT_READ | mmap.PROT_WRITE
Say = Callable[[str], None]


def serve(name: str, files: Sequence[Path], say: Say, check_s: float = CHECK_S) -> None:
    """Until SIGTERM or SIGINT. ``VgpuError``: the name is taken, a file is damaged, the vGPU has too little memory."""
    check_name(name)
    if not os.environ.get("VGPU_ID"):
        raise VgpuError(
            ErrorCode.INVALID,
            "the owner of a model runs in a vGPU, which is charged with the memory, and VGPU_ID is not set",
            "vgpuctl create --name weights --sm 1 --mem SIZE && "
            f"vgpuctl exec weights -- vgpuctl models serve {name} FILE...",
        )
    place = places.private_folder()
    socket = places.socket_of(place, name)
    check_length(socket)
    taken = VgpuError(
        ErrorCode.EXISTS, f"another process serves the model {name}", "vgpuctl models ls; choose another name"
    )
    try:
        with exclusive(places.lock_of(place, name), taken) as lock:
            lock.truncate()
            lock.write(f"{os.getpid()}\n".encode())
            lock.flush()
            owner = Owner(name, read_headers(files))
            trio.run(owner.run, socket, say, check_s)
    except OSError as error:
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"cannot serve the model {name} in {place}: {error.strerror or error}",
            f"set {places.FOLDER} to a directory of your own",
        ) from error


class Owner:
    """A loaded model. ``VgpuError`` (no-room): the vGPU has too little memory."""

    def __init__(self, name: str, tensors: Sequence[Stored]) -> None:
        self.card = Card()
        self.card.enter()
        rows, total = placed(tensors, self.card.granularity)
        vgpu_id = os.environ.get("VGPU_ID", "")
        self.table = Table(name, vgpu_id, os.getpid(), self.card.uuid, total, read_only=False, tensors=rows)
        check_size(self.table)
        handle = self.card.create(total)
        if handle is None:
            raise too_little(name, total, self.card)
        self.mapping = Mapping(self.card, handle, total)
        if not self.mapping.allow(READ_WRITE):
            raise VgpuError(ErrorCode.UNAVAILABLE, "the CUDA driver refuses access to memory that was just made")
        read_only = can_be_read_only(self.card, handle, total)
        rows = tuple(copied(self.card, self.mapping.address, tensors, rows, hashed=not read_only))
        self.mapping.allow(READ)
        self.table = replace(self.table, read_only=read_only, tensors=rows)
        self.descriptor, self._handle = self.card.exported(handle), handle
        self._ends = threading.Event()
        self.replicas: dict[MessageStream, int] = {}
        """The pid of each."""
        self.changed: list[str] = []
        """Tensors that a replica has written to."""

    async def run(self, socket: Path, say: Say, check_s: float) -> None:
        table = self.table
        listener = listen(socket, mode=0o600)
        lent = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    partial(serve_links, listener, self._serve, complain(say), most=MOST_REPLICAS + SPARE_LINKS)
                )
                if not table.read_only:
                    say("the driver refuses read-only access: a replica can change the weights, and a hash shows that")
                    nursery.start_soon(self._watch, say, check_s)
                say(
                    f"serves {table.name}: {len(table.tensors)} tensors, {format_bytes(table.total_bytes)} in "
                    f"{table.vgpu_id}"
                )
                with trio.open_signal_receiver(SIGTERM, SIGINT) as signals:
                    async for _ in signals:
                        lent = bool(self.replicas)
                        self._ends.set()
                        nursery.cancel_scope.cancel()
                        break
        finally:
            socket.unlink(missing_ok=True)  # noqa: ASYNC240 - the process ends
        if not lent:
            self._give_back()

    def _give_back(self) -> None:
        """No replica has the memory. The vGPU is not charged any more, whatever else this user's programs share."""
        self.mapping.close()
        os.close(self.descriptor)
        self.card.result("cuMemRelease", self._handle)

    def summary(self) -> Message:
        """For ``vgpuctl models ls``."""
        table = self.table
        return {
            "name": table.name,
            "vgpu_id": table.vgpu_id,
            "pid": table.pid,
            "gpu_uuid": table.gpu_uuid,
            "total_bytes": table.total_bytes,
            "tensors": len(table.tensors),
            "read_only": table.read_only,
            "changed": self.changed,
            "replicas": sorted(self.replicas.values()),
        }

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        peer = peer_of(sock)
        async with MessageStream(sock, MAX_CONTROL_BYTES, takes_descriptors=False) as link:
            with suppress(VgpuError, *LINK_ENDED):
                request = None
                with trio.move_on_after(ASK_S):
                    request = await link.receive()
                if request is None:
                    return
                if peer.uid != os.geteuid():
                    await link.send(refusal(ErrorCode.NOT_YOURS, f"the model {self.table.name} is another user's"))
                elif request[0].get("op") == "status":
                    await link.send(self.summary())
                elif self.changed:
                    text = f"a replica has changed the weights of {self.table.name}: {self.changed[0]}"
                    await link.send(refusal(ErrorCode.UNAVAILABLE, text, "start the owner again"))
                elif len(self.replicas) >= MOST_REPLICAS:
                    text = f"the model {self.table.name} has {MOST_REPLICAS} replicas, the most of one owner"
                    await link.send(refusal(ErrorCode.UNAVAILABLE, text, "end a replica, or start another owner"))
                else:
                    await self._lend(link, peer.process.pid)

    async def _lend(self, link: MessageStream, pid: int) -> None:
        """The link stays open for as long as the replica has the memory."""
        self.replicas[link] = pid
        try:
            await link.send(self.table.message(), (self.descriptor,))
            while await link.receive() is not None:
                pass
        finally:
            del self.replicas[link]

    async def _watch(self, say: Say, check_s: float) -> None:
        while not self.changed:
            await trio.sleep(check_s)
            self.changed = await trio.to_thread.run_sync(
                hashes.changed, self.mapping, self.table.tensors, self._ends.is_set
            )
        say(f"a replica has changed the weights: {', '.join(self.changed[:5])}; new replicas are refused")


def complain(say: Say) -> Callable[[OSError], None]:
    return lambda error: say(f"a replica could not connect: {error}")


def refusal(code: ErrorCode, text: str, hint: str = "") -> Message:
    return {"error": text, "code": code.value, "hint": hint}


def too_little(name: str, total: int, card: Card) -> VgpuError:
    free, limit = card.memory_info()
    return VgpuError(
        ErrorCode.NO_ROOM,
        f"the model {name} needs {format_bytes(total)}, and this vGPU has {format_bytes(free)} of its "
        f"{format_bytes(limit)} left",
        "vgpuctl set VGPU --mem SIZE",
    )


def check_size(table: Table) -> None:
    """``VgpuError`` (invalid): its message with all digests would be longer than a replica takes."""
    digest = bytes(hashes.DIGEST_BYTES)
    tensors = tuple(replace(tensor, digest=digest) for tensor in table.tensors)
    try:
        encode(replace(table, tensors=tensors).message(), MAX_ANSWER_BYTES)
    except ValueError as error:
        raise VgpuError(
            ErrorCode.INVALID,
            f"{table.name} has {len(tensors)} tensors, too many for one answer to a replica: {error}",
            "serve the files under several names",
        ) from error


def can_be_read_only(card: Card, handle: int, size: int) -> bool:
    """Whether the driver maps it so that a replica cannot write."""
    probe = Mapping(card, handle, size)
    try:
        return probe.allow(READ)
    finally:
        probe.close()


def copied(
    card: Card, address: int, tensors: Sequence[Stored], rows: Sequence[Placed], *, hashed: bool
) -> Iterable[Placed]:
    """Copy the files' tensors to their places. ``hashed``: with their digests."""
    for path, group in groupby(zip(tensors, rows, strict=True), key=lambda pair: pair[0].path):
        with content_of(path) as content:
            for tensor, row in group:
                if tensor.begin + tensor.size_bytes > len(content):
                    raise damaged(path, "it has become shorter")
                digest = b""
                if tensor.size_bytes:
                    source = (ctypes.c_char * tensor.size_bytes).from_buffer(content, tensor.begin)
                    try:
                        card.copy_in(address + row.offset, ctypes.addressof(source), tensor.size_bytes)
                        digest = hashes.digest(source) if hashed else b""
                    finally:
                        del source  # a mapping with views of it cannot be closed
                yield replace(row, digest=digest)


def content_of(path: Path) -> mmap.mmap:
    """Private and writable, since ctypes gives no address of a read-only buffer. Nothing is written."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, _READABLE)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged(path, "it has become empty") from error
