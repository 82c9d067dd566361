"""vgpuctl kubelet: what the DaemonSet runs on each node of a Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vgpu.errors import ErrorCode, VgpuError


def kubelet(
    node_name: Annotated[
        str, typer.Option("--node-name", metavar="NAME", envvar="NODE_NAME", help="Of this machine in Kubernetes.")
    ] = "",
    dra: Annotated[bool, typer.Option("--dra", help="Serve claims (Kubernetes 1.34 or newer); the default.")] = False,
    plugin: Annotated[bool, typer.Option("--plugin", help="Serve a resource for each size (Kubernetes 1.29).")] = False,
    profiles: Annotated[
        str, typer.Option(metavar="LIST", help="Offer vGPUs of these sizes alone, as in 30sm-8g,50sm-40g.")
    ] = "",
    compatible: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=N]",
            help="With --plugin, in place of profiles: nvshare.com/gpu or xpushare.com/gpu, N of each GPU; or "
            "aliyun.com/gpu-mem, its GiB.",
        ),
    ] = None,
    extender: Annotated[
        bool,
        typer.Option(
            "--extender",
            help="Give a pod the GPU that vgpuctl extender chose. With --compatible aliyun.com/gpu-mem, or "
            "nvidia.com/gpu=N, at most N vGPUs on each GPU.",
        ),
    ] = False,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="The kubelet's folder.")] = Path(
        "/var/lib/kubelet"
    ),
    instance: Annotated[
        str, typer.Option(metavar="NAME", envvar="POD_UID", help="Part of the sockets' names, for rolling updates.")
    ] = "",
) -> None:
    """Serve this machine's vGPUs to its kubelet. The node of vGPUs runs beside it."""
    from vgpu import extras, logs

    extras.need("kubelet", "kubernetes", "grpc", "google.protobuf", "lightkube", "httpx2")
    from vgpu.integrations.kubernetes import process
    from vgpu.integrations.kubernetes.kubelet import Places
    from vgpu.integrations.kubernetes.profiles import parse_all

    if dra and plugin:
        text = "--dra and --plugin would promise the same GPUs twice"
        raise VgpuError(ErrorCode.INVALID, text, "give one of them")
    if plugin and not profiles and not compatible:
        raise VgpuError(ErrorCode.INVALID, "which sizes? --plugin serves profiles", "--plugin --profiles 30sm-8g")
    if compatible and not plugin:
        raise VgpuError(ErrorCode.INVALID, "names of other projects are resources of a device plugin", "--plugin")
    if compatible and (profiles or len(compatible) > 1):
        text = "two names of the same GPUs would promise them twice"
        raise VgpuError(ErrorCode.INVALID, text, "give --profiles, or one --compatible")
    if extender and not compatible:
        text = "--extender gives pods the GPUs of resources with the names of other projects"
        raise VgpuError(ErrorCode.INVALID, text, "--plugin --compatible aliyun.com/gpu-mem --extender")
    if not node_name:
        raise VgpuError(ErrorCode.INVALID, "which node of Kubernetes is this?", "--node-name NAME, or set NODE_NAME")
    options = process.Options(node_name, Places(folder, instance), parse_all(profiles), tuple(compatible or ()))
    serve = process.serve_plugins if plugin else process.serve_dra
    logs.to_stderr("kubelet")
    (process.serve_assumed if extender else serve)(options)


def register(app: typer.Typer) -> None:
    app.command("kubelet")(kubelet)
