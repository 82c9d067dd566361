"""Where our HTTP servers listen: addresses as people type them, and their sockets. This machine's own by default."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from vgpu.errors import ErrorCode, VgpuError


@dataclass(frozen=True, slots=True)
class Address:
    """``local``: only programs of this machine can connect."""

    host: str
    port: int
    local: bool

    @property
    def url(self) -> str:
        """For a program on this machine; of "all addresses" it needs one."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:7080``, ``[::1]:7080``, ``localhost:7080``, ``:7080`` (this machine's), ``7080``. A
    port of 0: any that is free. ``ValueError`` for anything else."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    numbered = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not numbered or (":" in bare) != bracketed or "[" in bare:
        raise ValueError(f"{text!r} is not an address: write 127.0.0.1:7080 or [::1]:7080")
    return bare or "127.0.0.1", int(port)


def parse_address(text: str, example: str) -> Address:
    """As ``split_address``; ``VgpuError`` (invalid), with ``example``."""
    try:
        host, port = split_address(text)
    except ValueError:
        raise VgpuError(ErrorCode.INVALID, f"--listen: {text!r} is not an address", f"--listen {example}") from None
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return Address(host, port, local)


def bind(address: Address) -> tuple[socket.socket, Address]:
    """A socket that listens there, and the address with its port. ``VgpuError``: in-use if another process listens
    there, else invalid."""
    try:
        [family, kind, protocol, _, target], *_ = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(address, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise _cannot_listen(address, error) from error
    return listening, Address(address.host, listening.getsockname()[1], address.local)


def _cannot_listen(address: Address, error: OSError) -> VgpuError:
    host = f"[{address.host}]" if ":" in address.host else address.host
    message = f"cannot listen at {host}:{address.port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return VgpuError(ErrorCode.IN_USE, message, f"another port: --listen {host}:{address.port + 1}")
    return VgpuError(ErrorCode.INVALID, message, f"an address of this machine: --listen 127.0.0.1:{address.port}")
