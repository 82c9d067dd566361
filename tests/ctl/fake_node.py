"""A node as ``vgpuctl`` sees one: the control socket, with answers a test has put there."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vgpu.errors import VgpuError
from vgpu.protocol.codec import Decoder, Message, encode
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import REQUESTS, GpuStatus, NodeStatus, VgpuStatus
from vgpu.spec import VgpuSpec

Answer = Callable[[Any], dict[str, Any] | Iterator[dict[str, Any]]]


class FakeNode:
    """Listens in ``runtime_dir``. ``answers[op]`` takes the validated request; it returns a result or raises VgpuError.
    An iterator's results are a stream of notices, after which the link ends.

    ``asked`` records every request after the handshake, but for the confirmations of what was made (``confirmed``).
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.answers: dict[str, Answer] = {
            "quota": lambda _: {"uid": os.getuid(), "held": {"sm_percent": 0, "memory_bytes": 0, "vgpus": 0}},
            "queue": lambda _: {"waiting": []},
        }
        self.asked: list[Any] = []
        self.confirmed: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(runtime_dir / "control.sock"))
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        decoder = Decoder()
        with link, suppress(ConnectionError):
            while data := link.recv(1 << 16):
                decoder.feed(data)
                for message in decoder:
                    answer = self._answer(message)
                    for part in answer if isinstance(answer, Iterator) else [answer]:
                        link.sendall(encode(part))
                    if isinstance(answer, Iterator):
                        return

    def _answer(self, message: Message) -> Message | Iterator[Message]:
        if message["op"] == "hello":
            hello = Hello.model_validate(message)
            return _reply(hello.id, {"version": hello.version, "software": "9.9.9", "pid": os.getpid()})
        request = REQUESTS.validate_python(message)
        if request.op == "confirm" and request.op not in self.answers:
            self.confirmed.append(request.request_id)
            return _reply(request.id, {"vgpu_id": "vgpu-0a1b2c3d"})
        self.asked.append(request)
        try:
            result = self.answers[request.op](request)
            if isinstance(result, Iterator):
                return ({"id": request.id} | notice for notice in result)
            return _reply(request.id, result)
        except VgpuError as error:
            return {"id": request.id, "ok": False, "code": error.code, "error": error.message, "hint": error.hint}


def _reply(request_id: int, result: dict[str, Any]) -> Message:
    return {"id": request_id, "ok": True, "result": result}


def vgpu_reading(**changes: Any) -> VgpuStatus:
    fields: dict[str, Any] = {
        "vgpu_id": "vgpu-0a1b2c3d",
        "name": None,
        "gpu_index": 0,
        "gpu_uuid": "GPU-5d1e7a55-0000-0000-0000-000000000000",
        "simulated": False,
        "mode": "temporal",
        "state": "running",
        "owner_uid": os.getuid(),
        "spec": VgpuSpec(sm_percent=30),
        "created_unix_s": 1_700_000_000.0,
        "expires_unix_s": None,
        "guarantee_ratio": 0.3,
        "limit_ratio": 0.3,
        "sm_percent_granted": 100.0,
        "tokens_per_second": 25.0,
        "held_ratio": 0.3,
        "busy_ratio": 0.297,
        "tokens": 1234,
        "held_ns": 10**10,
        "busy_ns": 10**10,
        "overuse_ns": 0,
        "lag_ns": 0,
        "throttled": False,
        "wants": True,
        "holds": True,
        "memory_limit_bytes": 8 << 30,
        "memory_used_bytes": 3 << 29,
        "memory_reserved_bytes": 0,
        "memory_implicit_bytes": 500 << 20,
        "memory_peak_bytes": 2 << 30,
        "memory_refusals": 2,
        "memory_refused_bytes": 9 << 30,
        "processes": 1,
        "launches": 100_000,
        "broker_pid": 4711,
        "environment": {"VGPU_ID": "vgpu-0a1b2c3d", "VGPU_RUNTIME_DIR": "/run/vgpu"},
    }
    return VgpuStatus.model_validate(fields | changes)


def gpu_reading(**changes: Any) -> GpuStatus:
    fields: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-5d1e7a55-0000-0000-0000-000000000000",
        "name": "NVIDIA H200",
        "simulated": False,
        "state": "serving",
        "mode": "temporal",
        "mode_reason": "asked for",
        "period_ns": 57_000_000,
        "sm_count": 132,
        "total_memory_bytes": 141 << 30,
        "used_memory_bytes": 12 << 30,
        "guaranteed_ratio": 1.0,
        "guaranteed_memory_bytes": 16 << 30,
        "vgpus": 2,
        "processes": 2,
        "held_ratio": 1.0,
        "busy_ratio": 0.99,
        "tokens_per_second": 50.0,
        "server_pid": 4242,
        "restarts": 0,
    }
    return GpuStatus.model_validate(fields | changes)


def node_status(**changes: Any) -> NodeStatus:
    fields: dict[str, Any] = {
        "software": "9.9.9",
        "pid": os.getpid(),
        "uptime_ns": 3600 * 10**9,
        "simulated": False,
        "runtime_dir": "/run/vgpu",
        "state_dir": "/var/lib/vgpu",
        "gpus": [gpu_reading()],
        "vgpus": 1,
        "processes": 1,
    }
    return NodeStatus.model_validate(fields | changes)


def process_reading(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vgpu_id": "vgpu-0a1b2c3d",
        "gpu_index": 0,
        "slot": 0,
        "pid": 12345,
        "command": "python train.py --epochs 90 --batch-size 64 --data /datasets/imagenet",
        "alive": True,
        "wants": True,
        "has_work": False,
        "memory_bytes": 1 << 30,
        "memory_by_kind_bytes": {"device": 1 << 30},
        "memory_implicit_bytes": 500 << 20,
        "memory_peak_bytes": 2 << 30,
        "memory_refusals": 0,
        "busy_ns": 83 * 10**9,
        "overrun_ns": 0,
        "launches": 1_234_567,
        "graph_launches": 0,
        "copies": 10,
        "copied_bytes": 3 << 30,
        "gate_waits": 100,
        "gate_wait_ns": 10**9,
        "longest_kernel_ns": 12_345_678,
    }
    return fields | changes
