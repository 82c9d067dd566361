"""Which devices of the DRA driver work: the state of each GPU's server, streamed to the kubelet, which shows it in the
status of pods. A GPU Server that is down harms no program; new programs wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes import wire
from vgpu.integrations.kubernetes.dra import Object
from vgpu.integrations.kubernetes.profiles import Profile
from vgpu.integrations.kubernetes.watched import Watched

REPEAT_S: Final = 10.0
"""The kubelet takes a device for unknown once it has read nothing of it for 30 s."""
HEALTHY, UNHEALTHY, UNKNOWN = "HEALTHY", "UNHEALTHY", "UNKNOWN"
_Response = wire.message("v1.NodeWatchResourcesResponse")


def devices_of(gpu: Object, profiles: Sequence[Profile]) -> list[str]:
    """All that pods may have of a GPU, also those that do not fit just now."""
    if not profiles:
        return [f"gpu-{gpu['index']}"]
    sizes = ((profile, profile.count(100, gpu["total_memory_bytes"])) for profile in profiles)
    return [f"gpu-{gpu['index']}-{profile.name}-{number}" for profile, count in sizes for number in range(count)]


def health_of(gpus: Iterable[Object], profiles: Sequence[Profile]) -> dict[str, tuple[str, str]]:
    """Health and reason by device."""
    found: dict[str, tuple[str, str]] = {}
    for gpu in gpus:
        serves = gpu["state"] == "serving"
        said = (HEALTHY, "") if serves else (UNHEALTHY, f"the GPU Server of GPU {gpu['index']} is {gpu['state']}")
        found |= dict.fromkeys(devices_of(gpu, profiles), said)
    return found


class Health:
    """``pool``: of the devices, the name of the Kubernetes node."""

    def __init__(self, pool: str, node: Node, profiles: Sequence[Profile]) -> None:
        self._pool = pool
        self._node = node
        self._profiles = profiles
        self._found: Watched[Mapping[str, tuple[str, str]]] = Watched({})
        self.close = self._found.close

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return {"NodeWatchResources": self.watch}

    def refresh(self) -> None:
        """``VgpuError``: the node does not answer, and what its GPUs do is unknown."""
        try:
            with self._node.open_link() as link:
                self._found.set(health_of(link.ask("gpus")["gpus"], self._profiles))
        except VgpuError:
            self._found.set(dict.fromkeys(self._found.now, (UNKNOWN, "the node of vGPUs does not answer")))
            raise

    def watch(self, _: Any, is_active: Callable[[], bool]) -> Iterator[Any]:
        """All devices at first, after each change, and every ``REPEAT_S``."""
        yield from map(self._response, filter(None, self._found.values(is_active, REPEAT_S, repeat=True)))

    def _response(self, found: Mapping[str, tuple[str, str]]) -> Any:
        now = int(time.time())
        return _Response(
            devices=[
                {
                    "device": {"pool_name": self._pool, "device_name": device},
                    "health": health,
                    "last_updated_time": now,
                    "message": message,
                }
                for device, (health, message) in found.items()
            ]
        )
