"""The HTTP API of a container engine at its Unix socket, as far as the dashboard uses it.

Docker and podman answer the same requests, but for the creation: podman ignores a GPU that a Docker-compatible request
asks for (seen with 4.3.1), so that podman gets a request of its own API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import httpx

from vgpu.config import ImageConfig
from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.integrations.engines import LABEL, name_of, socket_path
from vgpu.web.containers.frames import Frames, Output
from vgpu.web.containers.models import ENTRY_LABEL, Container

ANSWER_S: Final = 30.0
STOP_S: Final = 10
"""Between SIGTERM and SIGKILL."""
PODMAN: Final = "Podman Engine"
CODE_OF: Final = {400: ErrorCode.INVALID, 404: ErrorCode.NOT_FOUND, 409: ErrorCode.IN_USE}


class EngineApi:
    """``address``: as ``unix:///run/docker.sock``. Every method raises ``VgpuError`` with the engine's own reason."""

    def __init__(self, address: str) -> None:
        self.address = address
        transport = httpx.AsyncHTTPTransport(uds=socket_path(address))
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://engine", timeout=ANSWER_S, trust_env=False
        )

    async def is_podman(self) -> bool:
        answer = await self._ask("GET", "/version")
        return any(part.get("Name") == PODMAN for part in answer.get("Components") or ())

    async def containers(self) -> list[Container]:
        """All of the engine's, with a vGPU and without."""
        listed = await self._ask("GET", "/containers/json", params={"all": "true"})
        return [_read(one) for one in listed]

    async def check_image(self, image: str) -> None:
        """``VgpuError`` (not found): the engine does not have it. Nothing is pulled for a page."""
        path = f"/v4.0.0/libpod/images/{image}/exists" if await self.is_podman() else f"/images/{image}/json"
        try:
            await self._ask("GET", path)
        except VgpuError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            raise VgpuError(
                ErrorCode.NOT_FOUND,
                f"the container engine does not have the image {image}",
                f"pull it with the engine's own command: docker pull {image}",
            ) from error

    async def create(
        self, name: str, image: ImageConfig, labels: Mapping[str, str], volumes: Sequence[str], gpu_uuid: str
    ) -> str:
        """The id of a new container, which does not run yet. ``gpu_uuid``: the GPU itself; "": a simulated one."""
        if await self.is_podman():
            path, body = "/v4.0.0/libpod/containers/create", podman_body(name, image, labels, volumes, gpu_uuid)
        else:
            path, body = "/containers/create", docker_body(image, labels, volumes, gpu_uuid)
        return str((await self._ask("POST", path, params={"name": name}, json=body))["Id"])

    async def start(self, container_id: str) -> None:
        await self._ask("POST", f"/containers/{container_id}/start")

    async def stop(self, container_id: str) -> None:
        """SIGTERM, then SIGKILL. A container that has ended stays as it is."""
        patience_s = ANSWER_S + STOP_S
        await self._ask("POST", f"/containers/{container_id}/stop", params={"t": str(STOP_S)}, timeout=patience_s)

    async def remove(self, container_id: str, *, force: bool) -> None:
        await self._ask("DELETE", f"/containers/{container_id}", params={"force": str(force).lower()})

    async def log(self, container_id: str, *, most_lines: int, follow: bool) -> AsyncGenerator[Output, None]:
        """The last lines, and with ``follow`` what comes after them, until the container ends."""
        inspected = await self._ask("GET", f"/containers/{container_id}/json")
        frames = Frames(terminal=bool(inspected["Config"]["Tty"]))
        params = {"stdout": "true", "stderr": "true", "tail": str(most_lines), "follow": str(follow).lower()}
        endless = httpx.Timeout(ANSWER_S, read=None)
        path = f"/containers/{container_id}/logs"
        try:
            async with self._client.stream("GET", path, params=params, timeout=endless) as answer:
                if answer.is_error:
                    await answer.aread()
                    raise _refusal(answer)
                async for data in answer.aiter_raw():
                    for output in frames.feed(data):
                        yield output
        except httpx.TransportError as error:
            raise self._silent(error) from error

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = await self._client.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise VgpuError(
                ErrorCode.TIMEOUT, f"the container engine at {self.address} did not answer in time"
            ) from error
        except httpx.TransportError as error:
            raise self._silent(error) from error
        if answer.is_error:
            raise _refusal(answer)
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:
            raise VgpuError(ErrorCode.PROTOCOL, f"{self.address} is no container engine: {error}") from error

    def _silent(self, error: Exception) -> VgpuError:
        return VgpuError(
            ErrorCode.UNREACHABLE,
            f"the container engine at {self.address} does not answer: {cleaned(str(error))}",
            "start its service: systemctl start docker, or: systemctl start podman.socket",
        )


def docker_body(
    image: ImageConfig, labels: Mapping[str, str], volumes: Sequence[str], gpu_uuid: str
) -> dict[str, object]:
    """As ``docker run --gpus device=UUID -v …`` asks for."""
    host: dict[str, object] = {"Binds": list(volumes)}
    if image.network:
        host["NetworkMode"] = image.network
    if gpu_uuid:
        host["DeviceRequests"] = [{"DeviceIDs": [gpu_uuid], "Capabilities": [["gpu"]]}]
    command = {"Cmd": list(image.command)} if image.command else {}
    return {"Image": image.image, "Labels": dict(labels), "HostConfig": host, **command}


def podman_body(
    name: str, image: ImageConfig, labels: Mapping[str, str], volumes: Sequence[str], gpu_uuid: str
) -> dict[str, object]:
    """As ``podman run --device nvidia.com/gpu=UUID -v …`` asks for."""
    body: dict[str, object] = {"name": name, "image": image.image, "labels": dict(labels)}
    body["mounts"] = [_mount(volume) for volume in volumes]
    if image.command:
        body["command"] = list(image.command)
    if image.network:
        body["netns"] = {"nsmode": image.network}
    if gpu_uuid:
        body["devices"] = [{"path": f"nvidia.com/gpu={gpu_uuid}"}]
    return body


def _mount(volume: str) -> dict[str, object]:
    source, _, target = volume.removesuffix(":ro").rpartition(":")
    access = "ro" if volume.endswith(":ro") else "rw"
    return {"type": "bind", "source": source, "destination": target, "options": ["rbind", access]}


def _read(listed: Mapping[str, Any]) -> Container:
    labels = listed.get("Labels") or {}
    return Container(
        id=listed["Id"],
        name=name_of(listed),
        image=listed["Image"],
        entry=labels.get(ENTRY_LABEL, ""),
        command=listed.get("Command") or "",
        state=listed["State"],
        status=listed.get("Status") or listed["State"],
        created_unix_s=listed["Created"],
        vgpus=(labels[LABEL],) if LABEL in labels else (),
    )


def _refusal(answer: httpx.Response) -> VgpuError:
    try:
        words = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        words = f"HTTP {answer.status_code}"
    code = CODE_OF.get(answer.status_code, ErrorCode.UNAVAILABLE)
    return VgpuError(code, f"the container engine refuses: {cleaned(words.strip(), 400)}")
