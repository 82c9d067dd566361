"""vgpuctl dashboard: the node in a browser, and its HTTP API."""

from __future__ import annotations

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
) -> None:
    """Show the node in a browser, and serve its HTTP API. The token gives all your rights at the node."""
    from vgpu import extras

    extras.need("dashboard", "web", "fastapi", "hypercorn", "prometheus_client", "swagger_ui_bundle")
    import trio

    from vgpu import logs
    from vgpu.config import load
    from vgpu.harness.signals import cause_of
    from vgpu.http.listening import bind, parse_address
    from vgpu.metrics.routes import router
    from vgpu.paths import NodePaths
    from vgpu.web.guard import Rules
    from vgpu.web.server import serve, token_from

    address, limits = parse_address(listen, EXAMPLE), load().config.limits
    if no_token and not address.local:
        raise VgpuError(
            ErrorCode.INVALID, f"--no-token would let in every user that reaches {listen}", f"--listen {EXAMPLE}"
        )
    if no_token and token_file is not None:
        raise VgpuError(ErrorCode.INVALID, "--no-token and --token-file contradict each other", "leave one out")
    control_socket = NodePaths.from_environment().control_socket
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
    try:
        trio.run(serve, control_socket, listening, rules, ready, [router(control_socket)], limits)
    except BaseExceptionGroup as group:  # stdout takes no more
        raise cause_of(group) from group


def register(app: typer.Typer) -> None:
    app.command("dashboard")(dashboard)
