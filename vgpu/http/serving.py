"""An ASGI application as a process: hypercorn on trio, until SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from hypercorn.config import Config
from hypercorn.trio import run
from hypercorn.trio import serve as serve_asgi
from starlette.types import ASGIApp

from vgpu.http.links import connections
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.openfiles import raise_limit
from vgpu.process_tuning import keep_all

IDLE_S: Final = 120.0
"""Longer than the pauses of scrapers, so that each keeps its connection."""


HANDSHAKE_S: Final = 5.0
"""A peer that shows no certificate holds a place for so long."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. ``clients``: peers need a certificate of one of these authorities; None: they need none."""

    certificate: Path
    key: Path
    clients: Path | None = None


async def serve_http(
    app: ASGIApp,
    listening: socket.socket,
    ready: Callable[[], None],
    stop_s: float,
    limits: Limits = DEFAULT_LIMITS,
    tls: Tls | None = None,
) -> None:
    """Serves ``app`` at ``listening``, which it takes over. ``ready`` is called once requests are answered. ``stop_s``:
    the time for unfinished answers at the end."""
    raise_limit()
    # hypercorn has no setting for it, and keeps a connection that its peer has closed for IDLE_S.
    run.TCPServer = connections(limits)  # type: ignore[attr-defined]
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.graceful_timeout = config.shutdown_timeout = stop_s
    config.keep_alive_timeout = IDLE_S
    config.loglevel = "WARNING"
    config.include_server_header = False
    if tls is not None:
        config.ssl_handshake_timeout = HANDSHAKE_S
        config.certfile, config.keyfile = str(tls.certificate), str(tls.key)
        if tls.clients is not None:
            config.ca_certs, config.verify_mode = str(tls.clients), ssl.CERT_REQUIRED
    ended = trio.Event()

    async def answer(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        await serve_asgi(app, config, shutdown_trigger=ended.wait, task_status=task_status)  # type: ignore[arg-type]
        nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(answer)
            keep_all()
            ready()
            async for _ in signals:
                ended.set()
                await trio.sleep_forever()  # until the answers are given
