"""A vGPU for a worker of Ray: it is waited for while the node has no room.

Ray keeps idle workers, each with its vGPU. So while a worker waits, those that are idle are asked to end, as Ray itself
asks them: a worker that still owns objects stays.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from vgpu.api.handle import Vgpu
from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import late
from vgpu.spec import VgpuSpec

IDLE_S: Final = 2.0
"""A worker that is idle for so long gives its vGPU to one that waits. Ray ends surplus workers after one second."""
IDLE: Final = b"ray::IDLE"
"""The title of a worker without a task (ray/_private/worker.py)."""
IDLE_SUSPEND_NS: Final = 300_000_000_000
"""The default of workers: Ray keeps idle ones."""
WORKER_ID: Final = "--worker-id="


def worker_id(command: Iterable[str]) -> str:
    """The id that Ray gave to the worker that ``command`` starts; "": it starts none."""
    return next((word.removeprefix(WORKER_ID) for word in command if word.startswith(WORKER_ID)), "")


def create(spec: VgpuSpec, gpu: str, claim: str, wait_s: float) -> Vgpu:
    """A vGPU that ends with this process. Waits up to ``wait_s`` where there is no room. ``claim``: its uid; "": none.

    ``VgpuError``: as ``Node.create``.
    """
    node = Node()
    asked: dict[str, Any] = {"claim": {"kind": "ray", "uid": claim}} if claim else {}

    def make() -> Vgpu:
        try:
            return node.create(spec, gpu=gpu, **asked)
        except VgpuError as error:
            if error.code is not ErrorCode.MODE or spec.idle_suspend_ns != IDLE_SUSPEND_NS:
                raise
        # The default, which no user gave; a spatial GPU suspends nothing.
        return node.create(spec.model_copy(update={"idle_suspend_ns": 0}), gpu=gpu, **asked)

    return late.patiently(make, wait_s, Reclaiming(node).look)


class Reclaiming:
    """Ends the idle workers that hold vGPUs of this user."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._idle_since: dict[int, float] = {}

    def look(self, now: float) -> None:
        idle = [pid for pid in self._holders() if _title(pid).startswith(IDLE)]
        self._idle_since = {pid: self._idle_since.get(pid, now) for pid in idle}
        for pid, since in self._idle_since.items():
            if now - since >= IDLE_S:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)

    def _holders(self) -> list[int]:
        with suppress(VgpuError):
            return [
                vgpu.reading["asker_pid"]
                for vgpu in self._node.list()
                if vgpu.reading.get("asker_pid") and vgpu.reading["owner_uid"] == os.getuid()
            ]
        return []


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
