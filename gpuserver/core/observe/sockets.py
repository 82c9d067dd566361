"""TCP sockets of a network namespace, as the kernel lists them (``/proc/PID/net/tcp``, ``tcp6``, ``snmp``). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LISTENS: Final = 0x0A
WAITS_FOR_ANSWER: Final = frozenset({0x01, 0x08})
"""States of a connection whose own end is open: ESTABLISHED, CLOSE_WAIT (the other end sends no more)."""


@dataclass(frozen=True, slots=True)
class Socket:
    """One line. Addresses are in the kernel's hexadecimal; those of IPv6 are longer. ``inode`` 0: no process has
    accepted it yet."""

    address: str
    port: int
    remote: str
    state: int
    inode: int

    @property
    def is_wildcard(self) -> bool:
        return not self.address.strip("0")

    @property
    def mark(self) -> int:
        """A number that names the connection: both of its ends, in 63 bits."""
        name = f"{self.address}:{self.port} {self.remote}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def parse(table: str, ports: Iterable[int] | None = None) -> list[Socket]:
    """The sockets of a table; ``ports``: those with one of these ports of their own. A line that is not understood is
    left out."""
    lines = table.splitlines()[1:]
    if ports is not None:  # of 10,000 lines most are others'
        wanted = frozenset(ports)
        words_of_ports = tuple(f":{port:04X} " for port in wanted)
        lines = [line for line in lines if any(word in line for word in words_of_ports)]
        return [one for one in _parsed(lines) if one.port in wanted]
    return _parsed(lines)


def _parsed(lines: Iterable[str]) -> list[Socket]:
    found = []
    for line in lines:
        words = line.split()
        try:
            address, port = words[1].split(":")
            found.append(Socket(address, int(port, 16), words[2], int(words[3], 16), int(words[9])))
        except (IndexError, ValueError):
            continue
    return found


def accepted(snmp: str) -> int | None:
    """How many connections the namespace has accepted since it is there; None: the table does not say."""
    rows = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    try:
        names, values = rows
        return int(values[names.index("PassiveOpens")])
    except (ValueError, IndexError):
        return None


def listening(sockets: Iterable[Socket], inodes: frozenset[int]) -> dict[int, int]:
    """Port → inode of the sockets that listen, and are among ``inodes``."""
    return {one.port: one.inode for one in sockets if one.state == LISTENS and one.inode in inodes}


def connections(sockets: Iterable[Socket], ports: Iterable[int]) -> list[Socket]:
    """The connections to one of ``ports`` that wait for an answer, or may."""
    wanted = frozenset(ports)
    return [one for one in sockets if one.port in wanted and one.state in WAITS_FOR_ANSWER]


def listeners_of(connection: Socket, sockets: Iterable[Socket]) -> frozenset[int]:
    """The inodes of the sockets that can have accepted ``connection``: those of its own address; without one, those of
    every address."""
    at_port = [
        one
        for one in sockets
        if one.state == LISTENS and one.port == connection.port and len(one.address) == len(connection.address)
    ]
    exact = frozenset(one.inode for one in at_port if one.address == connection.address)
    return exact or frozenset(one.inode for one in at_port if one.is_wildcard)


def arrived(
    sockets: Iterable[Socket], ports: Iterable[int], known: Iterable[int], inodes: frozenset[int]
) -> Socket | None:
    """A connection to one of ``ports`` that is not among ``known`` and was made to a socket among ``inodes``."""
    every, before = tuple(sockets), frozenset(known)
    fresh = (one for one in connections(every, ports) if one.mark not in before)
    return next((one for one in fresh if listeners_of(one, every) & inodes), None)
