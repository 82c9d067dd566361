"""The dashboard as a process, and its token."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trio
from fastapi import APIRouter

from vgpu.config import ImageConfig
from vgpu.errors import ErrorCode, VgpuError
from vgpu.http.serving import serve_http
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.web.app import application
from vgpu.web.feed import Feed
from vgpu.web.guard import Rules
from vgpu.web.timelines import Timelines

SHORTEST_TOKEN: Final = 16
STOP_S: Final = 0.5
"""Open pages are streams that never end by themselves."""


def token_from(path: Path | None) -> str:
    """The token in ``path``, which is made if it is missing; a fresh one without ``path``. ``VgpuError``."""
    if path is None:
        return secrets.token_urlsafe(24)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise VgpuError(ErrorCode.INVALID, f"--token-file: cannot make {path}: {error.strerror}") from error
    try:
        if path.stat().st_mode & 0o077:
            raise VgpuError(ErrorCode.INVALID, f"--token-file: {path} can be read by others", f"chmod 600 {path}")
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VgpuError(ErrorCode.INVALID, f"--token-file: cannot read {path}: {error}") from error
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise VgpuError(
            ErrorCode.INVALID,
            f"--token-file: {path} does not hold one word of at least {SHORTEST_TOKEN} ASCII letters",
            f"rm {path}, and it is made anew",
        )
    return token


async def serve(
    control_socket: Path,
    listening: socket.socket,
    rules: Rules,
    ready: Callable[[], None],
    routers: Sequence[APIRouter] = (),
    limits: Limits = DEFAULT_LIMITS,
    engine: str = "",
    images: Mapping[str, ImageConfig] = MappingProxyType({}),
) -> None:
    """Until SIGINT or SIGTERM. Takes ``listening`` over; ``ready`` is called once connections are answered.
    ``engine``: the socket of a container engine; "": no containers. ``images``: what may be started there."""
    feed = Feed(control_socket)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        if engine:
            from vgpu.web.containers.routes import Containers, routes

            containers = Containers(engine, images, control_socket, feed, nursery)
            nursery.start_soon(trio.to_thread.run_sync, containers.resume)
            routers = [*routers, routes(containers)]
        app = application(control_socket, feed, Timelines(control_socket, nursery), rules, routers, engine)
        await serve_http(app, listening, ready, STOP_S, limits)
        nursery.cancel_scope.cancel()
