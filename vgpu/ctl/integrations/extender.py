"""vgpuctl extender: the scheduler extender of a Kubernetes cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.http.serving import Tls

EXAMPLE: Final = "127.0.0.1:39999"
POLICIES: Final = ("spread", "pack", "fit")


def extender(
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; port 0: any.")] = EXAMPLE,
    policy: Annotated[
        str, typer.Option(metavar="|".join(POLICIES), help="How nodes are scored and their GPUs are chosen.")
    ] = "fit",
    limit: Annotated[
        str,
        typer.Option("--limit", metavar="TIME", help="A pod that its kubelet allocates later than this gets no GPU."),
    ] = "2m",
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate.", show_default=False),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's key.", show_default=False)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            metavar="FILE",
            help="Serve only schedulers with a certificate of this authority.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Choose the GPUs of pods for kube-scheduler, over HTTP. The pods' annotations are its only record."""
    from vgpu import extras, logs

    extras.need("extender", "kubernetes")
    import trio

    from vgpu.harness.signals import cause_of
    from vgpu.http.listening import bind, parse_address
    from vgpu.integrations.kubernetes.extender.objects import Objects
    from vgpu.integrations.kubernetes.extender.process import Options, serve
    from vgpu.integrations.kubernetes.objects import open_client
    from vgpu.units import parse_duration_ns

    address = parse_address(listen, EXAMPLE)
    if policy not in POLICIES:
        raise VgpuError(ErrorCode.INVALID, f"--policy: {policy!r} is none", f"--policy {POLICIES[-1]}")
    try:
        limit_s = parse_duration_ns(limit) / 1e9
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--limit: {error}", "--limit 2m") from None
    if limit_s < 1:
        raise VgpuError(ErrorCode.INVALID, "--limit is shorter than a kubelet needs", "--limit 2m")
    tls = _tls(tls_cert, tls_key, tls_client_ca)
    if (tls is None or tls.clients is None) and not address.local:
        text = (
            f"without the authority of the scheduler's certificate, each program that reaches {listen} could bind pods"
        )
        hint = f"--tls-cert FILE --tls-key FILE --tls-client-ca FILE, or --listen {EXAMPLE}"
        raise VgpuError(ErrorCode.INVALID, text, hint)
    objects = Objects(open_client())
    logs.to_stderr("extender")
    listening, address = bind(address)

    def ready() -> None:
        url = address.url if tls is None else address.url.replace("http:", "https:", 1)
        print(f"{url}vgpu-scheduler answers the scheduler; Ctrl-C ends it", flush=True)

    try:
        trio.run(partial(serve, objects, Options(policy, limit_s, tls), listening, ready))
    except BaseExceptionGroup as group:
        raise cause_of(group) from group


def _tls(certificate: Path | None, key: Path | None, clients: Path | None) -> Tls | None:
    """``VgpuError`` (invalid): they do not belong together, or cannot be read."""
    import ssl

    from vgpu.http.serving import Tls

    if certificate is None and key is None and clients is None:
        return None
    if certificate is None or key is None:
        raise VgpuError(ErrorCode.INVALID, "TLS needs a certificate and its key", "--tls-cert FILE --tls-key FILE")
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
        context.load_cert_chain(certificate, key)
    except OSError as error:  # of ssl as well
        files = f"{certificate} and {key}" if clients is None else f"{certificate}, {key} and {clients}"
        raise VgpuError(ErrorCode.INVALID, f"{files} cannot be used: {error}") from error
    return Tls(certificate, key, clients)


def register(app: typer.Typer) -> None:
    app.command("extender")(extender)
