"""vgpuctl dashboard: the node in a browser, and its HTTP API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from vgpu.errors import ErrorCode, VgpuError

EXAMPLE: Final = "127.0.0.1:7080"


def dashboard(
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; port 0: any.")] = EXAMPLE,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser, too.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The token is in there, or put there; else a new one each time.", show_default=False
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let in every user of this machine; loopback addresses only.")
    ] = False,
    containers: Annotated[
        str,
        typer.Option(
            metavar="SOCKET",
            help="Show the containers of this engine, too, as unix:///run/docker.sock; "
            "start those of [image.NAME] in the configuration file.",
            show_default=False,
        ),
    ] = "",
    nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show all nodes of this file, too, at /nodes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the node in a browser, and serve its HTTP API. The token gives all your rights at the node."""
    from vgpu import extras

    extras.need("dashboard", "web", "fastapi", "hypercorn", "prometheus_client", "swagger_ui_bundle")
    if containers:
        extras.need("dashboard --containers", "containers", "httpx")
    import trio

    from vgpu import logs
    from vgpu.config import load
    from vgpu.harness.signals import cause_of
    from vgpu.http.listening import bind, parse_address
    from vgpu.metrics.routes import router
    from vgpu.paths import NodePaths
    from vgpu.web.guard import Rules
    from vgpu.web.server import serve, token_from

    address, config = parse_address(listen, EXAMPLE), load().config
    if no_token and not address.local:
        raise VgpuError(
            ErrorCode.INVALID, f"--no-token would let in every user that reaches {listen}", f"--listen {EXAMPLE}"
        )
    if no_token and token_file is not None:
        raise VgpuError(ErrorCode.INVALID, "--no-token and --token-file contradict each other", "leave one out")
    if containers and no_token:
        raise VgpuError(
            ErrorCode.INVALID, "--no-token and --containers: each program here would be as root", "leave one out"
        )
    if containers:
        _check_engine(containers)
    control_socket = NodePaths.from_environment().control_socket
    routers = [router(control_socket)]
    if nodes is not None:
        from vgpu.nodes.file import load as load_nodes
        from vgpu.web.nodes import router as nodes_router

        routers.append(nodes_router(load_nodes(nodes)))
    token = None if no_token else token_from(token_file)
    logs.to_stderr("dashboard")
    listening, address = bind(address)
    url = address.url if token is None else f"{address.url}?token={token}"

    def ready() -> None:
        print(f"dashboard of the node at {control_socket}; Ctrl-C ends it\n{url}", flush=True)
        if open_:
            import webbrowser

            webbrowser.open(url)

    rules = Rules(token, address.local, address.port)
    served = partial(serve, limits=config.limits, engine=containers, images=config.image)
    try:
        trio.run(served, control_socket, listening, rules, ready, routers)
    except BaseExceptionGroup as group:  # stdout takes no more
        raise cause_of(group) from group


def _check_engine(address: str) -> None:
    """``VgpuError``: no engine answers there."""
    from vgpu.integrations.engines import SocketEngine, socket_path

    try:
        path = socket_path(address)
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--containers: {error}") from None
    if SocketEngine(address).containers("") is None:
        raise VgpuError(
            ErrorCode.UNREACHABLE,
            f"--containers: no container engine answers at {path}",
            "start its service: systemctl start docker, or: systemctl start podman.socket",
        )


def register(app: typer.Typer) -> None:
    app.command("dashboard")(dashboard)
