"""The exporter as a process: hypercorn on trio, until SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio
from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from hypercorn.config import Config
from hypercorn.trio import serve as serve_asgi

from vgpu.metrics.routes import router
from vgpu.protocol.service import software_version

STOP_S: Final = 1.0
"""For answers that are on their way."""
IDLE_S: Final = 120.0
"""Longer than scrapers pause, so that each keeps its connection."""


def application(control_socket: Path) -> FastAPI:
    app = FastAPI(title="st-vgpu exporter", version=software_version(), openapi_url=None)
    app.include_router(router(control_socket))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/metrics")

    return app


async def serve(control_socket: Path, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. Takes ``listening`` over; ``ready`` is called once requests are answered."""
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.graceful_timeout = config.shutdown_timeout = STOP_S
    config.keep_alive_timeout = IDLE_S
    config.loglevel = "WARNING"
    config.include_server_header = False
    ended = trio.Event()
    async with trio.open_nursery() as nursery:

        async def answer(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            app = application(control_socket)
            await serve_asgi(app, config, shutdown_trigger=ended.wait, task_status=task_status)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()

        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await nursery.start(answer)
            ready()
            async for _ in signals:
                ended.set()
                break
