"""Sockets between this process and the kubelet.

================================================  =================================================================
``plugins_registry/vgpu.dev-INSTANCE-reg.sock``   the kubelet finds it, and asks what this driver is
``plugins/vgpu.dev/dra-INSTANCE.sock``            the kubelet prepares claims there
``device-plugins/kubelet.sock``                   the kubelet's own: a device plugin registers there
``device-plugins/vgpu.dev-PROFILE.sock``          the kubelet asks for devices of one resource there
``pod-resources/kubelet.sock``                    the kubelet's own: which container has which devices
================================================  =================================================================

An instance is a pod of the DaemonSet. While a new version replaces an old one, both have sockets and both may answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes import wire
from vgpu.integrations.kubernetes.dra import DRIVER
from vgpu.loggers import get_logger

log = get_logger(__name__)
FOLDER: Final = Path("/var/lib/kubelet")
VERSIONS: Final = ("v1.DRAPlugin", wire.DRA_HEALTH)
"""Kubelets before 1.34 speak v1beta1 alone. Their API servers have no claims of version 1. A kubelet that does not know
a service of this list does not ask for it."""
THREADS: Final = 16
ANSWER_S: Final = 20.0
_Info = wire.message("pluginregistration.PluginInfo")
_Register = wire.message("v1beta1.RegisterRequest")
_Noted = wire.message("pluginregistration.RegistrationStatusResponse")


@dataclass(frozen=True, slots=True)
class Places:
    """``folder``: the kubelet's. ``instance``: "" if there is one at most at a time."""

    folder: Path = FOLDER
    instance: str = ""

    @property
    def registry(self) -> Path:
        return self.folder / "plugins_registry" / f"{'-'.join(filter(None, (DRIVER, self.instance)))}-reg.sock"

    @property
    def dra(self) -> Path:
        return self.folder / "plugins" / DRIVER / f"{'-'.join(filter(None, ('dra', self.instance)))}.sock"

    @property
    def plugins(self) -> Path:
        return self.folder / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        return self.folder / "pod-resources" / "kubelet.sock"


def serve(path: Path, handlers: Iterable[grpc.GenericRpcHandler]) -> grpc.Server:
    """A server that listens at ``path``. ``VgpuError``: it cannot."""
    if len(str(path)) > wire.LONGEST_SOCKET:
        raise VgpuError(ErrorCode.INVALID, f"the socket's path is longer than {wire.LONGEST_SOCKET} bytes: {path}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(THREADS), tuple(handlers))
        server.add_insecure_port(f"unix:{path}")
        server.start()
    except (OSError, RuntimeError) as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, f"no server can listen at {path}: {error}") from error
    return server


class DraSockets:
    """The two sockets of the DRA driver. ``health``: the methods of its health service. ``registered`` is called each
    time the kubelet has taken it."""

    def __init__(
        self,
        places: Places,
        prepare: Callable[[Any], Any],
        unprepare: Callable[[Any], Any],
        health: Mapping[str, Callable[..., Any]],
        registered: Callable[[], None],
    ) -> None:
        self._places = places
        self._registered = registered
        sweep(places.registry.parent, f"{DRIVER}*-reg.sock")
        methods = {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}
        handlers = [wire.handlers(wire.DRA, methods), wire.handlers(wire.DRA_HEALTH, health)]
        self._servers = [serve(places.dra, handlers)]
        notes = {"GetInfo": self._info, "NotifyRegistrationStatus": self._note}
        self._servers.append(serve(places.registry, [wire.handlers(wire.REGISTRATION, notes)]))

    def close(self, grace_s: float = 5.0) -> None:
        """The registration goes first, so that the kubelet does not ask a driver that is leaving."""
        for server in reversed(self._servers):
            server.stop(grace_s).wait()
        for path in (self._places.registry, self._places.dra):
            path.unlink(missing_ok=True)

    def _info(self, _: Any) -> Any:
        return _Info(type="DRAPlugin", name=DRIVER, endpoint=str(self._places.dra), supported_versions=VERSIONS)

    def _note(self, status: Any) -> Any:
        if status.plugin_registered:
            log.info("the kubelet has registered the driver")
            self._registered()
        else:
            log.error("the kubelet refuses the driver", reason=status.error)
        return _Noted()


class PluginSockets:
    """The socket of one device plugin, and its registration. ``turn`` keeps both: a kubelet that starts removes all
    sockets in its folder, and knows no plugin."""

    def __init__(self, places: Places, resource: str, methods: Mapping[str, Callable[..., Any]], options: Any) -> None:
        self._kubelet = places.plugins / "kubelet.sock"
        self._path = places.plugins / f"{resource.replace('/', '-')}.sock"
        self._resource, self._methods, self._options = resource, methods, options
        self._server: grpc.Server | None = None
        self._known: tuple[int, int] | None = None

    def turn(self) -> None:
        """``VgpuError``: the kubelet does not answer, or refuses."""
        try:
            found = self._kubelet.stat()
        except OSError as error:
            raise VgpuError(ErrorCode.UNREACHABLE, f"no kubelet listens at {self._kubelet}") from error
        current = found.st_ino, found.st_ctime_ns
        if current == self._known and self._path.exists():
            return
        self._known = None
        if self._server is not None:
            self._server.stop(None)
        self._server = serve(self._path, [wire.handlers(wire.PLUGIN, self._methods)])
        request = _Register(
            version="v1beta1", endpoint=self._path.name, resource_name=self._resource, options=self._options
        )
        try:
            with wire.Client(wire.PLUGIN_REGISTRATION, self._kubelet) as kubelet:
                kubelet.Register(request, timeout=ANSWER_S)
        except grpc.RpcError as error:
            text = f"the kubelet does not take {self._resource}: {error.details()}"
            raise VgpuError(ErrorCode.UNAVAILABLE, text) from error
        self._known = current
        log.info("the kubelet has registered the plugin", resource=self._resource)

    def close(self, grace_s: float = 5.0) -> None:
        if self._server is not None:
            self._server.stop(grace_s).wait()
        self._path.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str) -> None:
    """Remove the sockets of instances that were killed: the kubelet would try them for ever."""
    for path in folder.glob(pattern):
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
