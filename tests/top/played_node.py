"""A node that tells ``vgpuctl top`` what a test wants it to."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ctl.fake_node import FakeNode, gpu_reading, process_reading, vgpu_reading
from vgpu.protocol.messages import GpuStatus, Snapshot, VgpuStatus

END: Any = None


def three() -> tuple[VgpuStatus, ...]:
    """On two GPUs."""
    return (
        vgpu_reading(vgpu_id="vgpu-00000001", name="train", tokens_per_second=25.0, held_ratio=0.2, memory_refusals=0),
        vgpu_reading(vgpu_id="vgpu-00000002", name="infer", tokens_per_second=50.0, held_ratio=0.1, processes=2),
        vgpu_reading(vgpu_id="vgpu-00000003", name=None, tokens_per_second=5.0, held_ratio=0.3, gpu_index=1),
    )


class PlayedNode(FakeNode):
    """``tell``: a notice to whoever watches; ``hang_up``: the link of whoever does ends. ``vgpus`` is told by itself
    when somebody begins to watch."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(runtime_dir)
        self.vgpus = three()
        self.gpus: tuple[GpuStatus, ...] = (gpu_reading(simulated=True), gpu_reading(index=1, simulated=True))
        self.pid = 4711
        self._notices: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.answers |= {
            "watch": self._watched,
            "status": lambda request: self._status(),
            "events": lambda request: {"events": [event("created", "vgpu-00000001", "vgpu-00000001 created")]},
            "processes": lambda request: {
                "processes": [process_reading(vgpu_id="vgpu-00000002", pid=pid, slot=pid) for pid in (222, 111)]
            },
            "inspect": lambda request: {
                "vgpu": self.vgpus[0].model_dump(mode="json"),
                "processes": [],
                "gpu": self.gpus[0].model_dump(mode="json"),
                "notes": ["a note"],
            },
        }

    def snapshot(self) -> Snapshot:
        return Snapshot(at_unix_s=time.time(), gpus=self.gpus, vgpus=self.vgpus)

    def tell(self, **notice: Any) -> None:
        self._notices.put(notice)

    def tell_vgpus(self, *vgpus: VgpuStatus) -> None:
        self.vgpus = vgpus
        self.tell(snapshot=self.snapshot().model_dump(mode="json"))

    def hang_up(self) -> None:
        self._notices.put(END)

    def close(self) -> None:
        self.hang_up()
        super().close()

    def _watched(self, request: Any) -> Iterator[dict[str, Any]]:
        yield {"snapshot": self.snapshot().model_dump(mode="json")}
        while (notice := self._notices.get()) is not END:
            yield notice

    def _status(self) -> dict[str, Any]:
        return {
            "software": "9.9.9",
            "pid": self.pid,
            "uptime_ns": 3600 * 10**9,
            "simulated": True,
            "runtime_dir": "/run/vgpu",
            "state_dir": "/var/lib/vgpu",
            "gpus": [gpu.model_dump(mode="json") for gpu in self.gpus],
            "vgpus": len(self.vgpus),
            "processes": 3,
        }


def event(kind: str, vgpu_id: str, text: str) -> dict[str, Any]:
    return {"at_unix_s": time.time(), "kind": kind, "gpu_index": 0, "vgpu_id": vgpu_id, "text": text}
