"""Limits the connections that our HTTP servers serve: per source, and in all. Each ends with its peer.

A source is a user where the peer is of this machine, by the kernel's table of TCP sockets; else an address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import trio
from hypercorn.trio.tcp_server import TCPServer

from vgpu.limits import DEFAULT_LIMITS, Limits

Source: TypeAlias = int | str
End: TypeAlias = tuple[str, int]
"""Host, without a scope, and port."""
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(slots=True)
class Room:
    """Pure. ``exempt``: uids without a bound per source, for which ``http_links_kept`` places are kept."""

    limits: Limits = DEFAULT_LIMITS
    exempt: frozenset[int] = frozenset({0})
    _links: Counter[Source] = field(default_factory=Counter)

    def enter(self, source: Source) -> bool:
        """Whether there is a place; then it is taken until ``leave``."""
        most = self.limits.http_links
        if source not in self.exempt:
            most -= self.limits.http_links_kept
            if self._links[source] >= self.limits.http_links_per_source:
                return False
        if self._links.total() >= most:
            return False
        self._links[source] += 1
        return True

    def leave(self, source: Source) -> None:
        self._links[source] -= 1
        if not self._links[source]:
            del self._links[source]


def encoded(end: End) -> str:
    """As the kernel's table has it: each 32 bits of the address in the machine's order."""
    packed = ipaddress.ip_address(end[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


def uid_in(table: str, near: End, far: End) -> int | None:
    """The uid of the socket at ``near`` that is connected to ``far``; None if none is in ``table``."""
    wanted = [encoded(near), encoded(far)]
    for line in table.splitlines():
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7])
    return None


def source_of(sock: socket.socket | trio.socket.SocketType) -> Source:
    """Reads the kernel's tables where the peer is of this machine. ``OSError``: the peer has gone."""
    peer, own = _end(sock.getpeername()), _end(sock.getsockname())
    if peer[0] == own[0] or ipaddress.ip_address(peer[0]).is_loopback:
        for table in TABLES:
            with suppress(OSError, ValueError, IndexError):
                uid = uid_in(table.read_text(), peer, own)
                if uid is not None:
                    return uid
    return peer[0]


def _end(address: Sequence[Any]) -> End:
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), int(address[1])


def connections(limits: Limits) -> type[TCPServer]:
    """What hypercorn makes of each connection of one server."""
    room = Room(limits, frozenset({0, os.geteuid()}))

    class Connection(TCPServer):
        async def run(self) -> None:
            try:
                stream = getattr(self.stream, "transport_stream", self.stream)  # below TLS
                source = await trio.to_thread.run_sync(source_of, stream.socket)
            except OSError:
                await self.stream.aclose()
                return
            if not room.enter(source):
                await self.stream.aclose()
                return
            try:
                await super().run()
            finally:
                room.leave(source)

        async def _read_data(self) -> None:
            """The peer has closed its end: what would wait for its next request has nothing to wait for."""
            await super()._read_data()
            await self.idle_task.stop()

    return Connection
