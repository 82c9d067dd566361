"""vgpuctl metrics: what the node counts, for Prometheus: once, into a file, or served for scrapes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu.ctl.exit_codes import Exit, report
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.limits import Limits

EXAMPLE: Final = "127.0.0.1:9835"


def metrics(
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS",
            help=f"Serve /metrics and /healthz there, as in {EXAMPLE}.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help=f"Serve them where the configuration file says, else at {EXAMPLE}."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Into a file, for node_exporter's textfile collector.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Print the node's metrics for Prometheus, or serve them."""
    from vgpu import extras

    if listen is None and not serve:
        extras.need("metrics", "metrics", "prometheus_client")
        return _once(out)
    if out is not None:
        raise VgpuError(ErrorCode.INVALID, "--listen serves metrics, and -o writes them once: give one of them")
    extras.need(f"metrics {'--serve' if serve else '--listen'}", "metrics")
    from vgpu.config import load

    config = load().config
    return _serve(listen or config.metrics.listen or EXAMPLE, config.limits)


def _once(out: Path | None) -> int:
    """Write the metrics once. If the node is down, they say so: older metrics must not pass for current ones."""
    import trio

    from vgpu.files import replaced
    from vgpu.metrics.exposition import exposition
    from vgpu.metrics.source import Source
    from vgpu.paths import NodePaths

    source = Source(NodePaths.from_environment().control_socket)
    seen = trio.run(source.see)
    text = exposition(seen)
    if out is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        with replaced(out) as file:
            file.write(text)
    if seen.error is None:
        return Exit.OK
    hint = seen.error.hint or "vgpuctl serve --detach starts one; vgpuctl status"
    return report(VgpuError(seen.error.code, seen.error.message, hint))


def _serve(listen: str, limits: Limits) -> int:
    import trio

    from vgpu import logs
    from vgpu.harness.signals import cause_of
    from vgpu.http.listening import bind, parse_address
    from vgpu.metrics import serve
    from vgpu.paths import NodePaths

    logs.to_stderr("metrics")
    listening, address = bind(parse_address(listen, EXAMPLE))

    def ready() -> None:
        print(f"metrics at {address.url}metrics", flush=True)

    try:
        trio.run(serve.serve, NodePaths.from_environment().control_socket, listening, ready, limits)
    except BaseExceptionGroup as group:  # stdout takes no more
        raise cause_of(group) from group
    return Exit.OK


def register(app: typer.Typer) -> None:
    app.command("metrics")(metrics)
