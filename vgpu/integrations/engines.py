"""Container engines: docker, podman, nerdctl by their own command line, and each by the socket of its HTTP API."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError

KNOWN: Final = ("docker", "podman", "nerdctl")
LABEL: Final = "vgpu.dev/vgpu"
"""Of each container that ``vgpuctl container run`` makes: the id of its vGPU."""
ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Engine:
    """``path``: of its command."""

    path: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    def run_command(self, words: Sequence[str], vgpu_id: str, volumes: Sequence[str], gpu_uuid: str) -> list[str]:
        """``ENGINE run`` with the mounts of a vGPU before the user's ``words``. ``gpu_uuid``: the GPU itself, by
        NVIDIA's toolkit; "": a simulated one."""
        given = ["--label", f"{LABEL}={vgpu_id}"]
        for volume in volumes:
            given += ["-v", volume]
        if gpu_uuid:
            given += ["--device", f"nvidia.com/gpu={gpu_uuid}"] if self.name == "podman" else self._gpus(gpu_uuid)
        return [self.path, "run", *given, *words]

    @staticmethod
    def _gpus(gpu_uuid: str) -> list[str]:
        return ["--gpus", f"device={gpu_uuid}"]

    def containers(self, vgpu_id: str, *, running: bool = False) -> list[str] | None:
        """The names of the containers with this vGPU, running or not; ``running``: of those alone that run. None: the
        engine does not answer."""
        label = f"label={LABEL}={vgpu_id}"
        try:
            asked = subprocess.run(
                [self.path, "ps", *([] if running else ["--all"]), "--filter", label, "--format", "{{.Names}}"],
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return asked.stdout.split() if asked.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class SocketEngine(Engine):
    """``path``: of its socket, as ``unix:///run/docker.sock``. Docker and podman answer alike there."""

    def containers(self, vgpu_id: str, *, running: bool = False) -> list[str] | None:
        # The standard library: a keeper lives as long as its container, and httpx would double its memory.
        import http.client
        import json
        import socket
        from urllib.parse import quote

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.settimeout(ANSWER_S)
                self.sock.connect(path)

        path = socket_path(self.path)
        connection = Connection("engine")
        try:
            filters = quote(json.dumps({"label": [f"{LABEL}={vgpu_id}"]}))
            connection.request("GET", f"/containers/json?all={str(not running).lower()}&filters={filters}")
            answer = connection.getresponse()
            listed = json.loads(answer.read())
            return [name_of(one) for one in listed] if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def name_of(listed: Mapping[str, Any]) -> str:
    """Of a container, as the API lists it."""
    return str((listed.get("Names") or [listed["Id"][:12]])[0]).removeprefix("/")


def socket_path(text: str) -> str:
    """The path in ``unix:///PATH``. ``ValueError``: it is something else."""
    scheme, _, path = text.partition("://")
    if scheme != "unix" or not Path(path).is_absolute() or not path.isprintable():
        raise ValueError(f"{text!r} is no socket of an engine: write unix:///run/docker.sock")
    return path


def at(path: str) -> Engine:
    """The engine whose command or socket this is."""
    return SocketEngine(path) if path.startswith("unix://") else Engine(path)


def find(wanted: str = "") -> Engine:
    """The engine of that name or path; "": the first of ``KNOWN`` that answers, else the first that is installed.
    ``VgpuError`` (invalid): none is."""
    paths = map(shutil.which, (wanted,) if wanted else KNOWN)
    installed = [Engine(path) for path in paths if path is not None]
    for engine in installed:
        if len(installed) == 1 or engine.containers("") is not None:
            return engine
    if installed:
        return installed[0]
    if wanted:
        raise VgpuError(
            ErrorCode.INVALID, f"there is no container engine {wanted!r} here", "--engine docker, podman or a path"
        )
    raise VgpuError(
        ErrorCode.INVALID,
        f"no container engine is installed ({', '.join(KNOWN)})",
        "install one, or give --engine PATH",
    )
