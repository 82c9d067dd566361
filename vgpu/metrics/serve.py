"""The exporter as a process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import RedirectResponse

from vgpu.http.serving import serve_http
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.metrics.routes import router
from vgpu.protocol.service import software_version

STOP_S: Final = 1.0
"""For answers that are on their way."""


def application(control_socket: Path) -> FastAPI:
    app = FastAPI(title="st-vgpu exporter", version=software_version(), openapi_url=None)
    app.include_router(router(control_socket))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/metrics")

    return app


async def serve(
    control_socket: Path, listening: socket.socket, ready: Callable[[], None], limits: Limits = DEFAULT_LIMITS
) -> None:
    """Until SIGINT or SIGTERM. Takes ``listening`` over; ``ready`` is called once requests are answered."""
    await serve_http(application(control_socket), listening, ready, STOP_S, limits)
