"""The owner of a model: it loads the files into one allocation, and gives replicas the handle of it.

It allocates nothing else, and computes nothing. The replicas keep the memory if the owner ends; a later replica gets an
error. Where the driver has no read-only access, the owner compares the bytes with their hashes once a minute.
"""

from __future__ import annotations

import ctypes
import mmap
import os
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
from vgpu.models.safetensors import Stored, damaged, read_headers
from vgpu.models.table import Placed, Table, check_name, placed
from vgpu.protocol.codec import MAX_CONTROL_BYTES, Message
from vgpu.protocol.peer import peer_of
from vgpu.protocol.stream import LINK_ENDED, MessageStream, listen, serve_links
from vgpu.units import format_bytes

MOST_REPLICAS: Final = 256
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
            f"vgpuctl run --sm 1 --mem SIZE -- vgpuctl models serve {name} FILE...",
        )
    place = places.private_folder()
    taken = VgpuError(
        ErrorCode.EXISTS, f"another process serves the model {name}", "vgpuctl models ls; choose another name"
    )
    with exclusive(places.lock_of(place, name), taken) as lock:
        lock.truncate()
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
        owner = Owner(name, read_headers(files))
        trio.run(owner.run, places.socket_of(place, name), say, check_s)


class Owner:
    """A loaded model. ``VgpuError`` (no-room): the vGPU has too little memory."""

    def __init__(self, name: str, tensors: Sequence[Stored]) -> None:
        self.card = Card()
        self.card.enter()
        rows, total = placed(tensors, self.card.granularity)
        handle = self.card.create(total)
        if handle is None:
            raise too_little(name, total, self.card)
        self.mapping = Mapping(self.card, handle, total)
        if not self.mapping.allow(READ_WRITE):
            raise VgpuError(ErrorCode.UNAVAILABLE, "the CUDA driver refuses access to memory that was just made")
        read_only = can_be_read_only(self.card, handle, total)
        rows = tuple(copied(self.card, self.mapping.address, tensors, rows, hashed=not read_only))
        self.mapping.allow(READ)
        vgpu_id = os.environ.get("VGPU_ID", "")
        self.table = Table(name, vgpu_id, os.getpid(), self.card.uuid, total, read_only, rows)
        self.descriptor = self.card.exported(handle)
        self.replicas: dict[MessageStream, int] = {}
        """The pid of each."""
        self.changed: list[str] = []
        """Tensors that a replica has written to."""

    async def run(self, socket: Path, say: Say, check_s: float) -> None:
        table = self.table
        listener = listen(socket, mode=0o600)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve_links, listener, self._serve, complain(say), most=MOST_REPLICAS))
                if not table.read_only:
                    say("the driver refuses read-only access: a replica can change the weights, and a hash shows that")
                    nursery.start_soon(self._watch, say, check_s)
                say(
                    f"serves {table.name}: {len(table.tensors)} tensors, {format_bytes(table.total_bytes)} in "
                    f"{table.vgpu_id}"
                )
                with trio.open_signal_receiver(SIGTERM, SIGINT) as signals:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        break
        finally:
            socket.unlink(missing_ok=True)  # noqa: ASYNC240 - the process ends

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
            self.changed = await trio.to_thread.run_sync(hashes.changed, self.mapping, self.table.tensors)
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
        # Private and writable, since ctypes gives no address of a read-only buffer. Nothing is written.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, _READABLE) as content:
            for tensor, row in group:
                if tensor.begin + tensor.size_bytes > len(content):
                    raise damaged(path, "it has become shorter")
                digest = b""
                if tensor.size_bytes:
                    source = (ctypes.c_char * tensor.size_bytes).from_buffer(content, tensor.begin)
                    card.copy_in(address + row.offset, ctypes.addressof(source), tensor.size_bytes)
                    digest = hashes.digest(source) if hashed else b""
                    del source
                yield replace(row, digest=digest)
