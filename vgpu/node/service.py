"""A message to systemd, if it started this process: the protocol of sd_notify(3), which is one datagram."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


def tell_service_manager(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send ``state`` (``READY=1``, ``STOPPING=1``) to ``$NOTIFY_SOCKET``. If no process listens there, do nothing."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
