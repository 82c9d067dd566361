"""Reads the state of all GPU Servers in parallel, for requests about the whole node.

The node waits ``LOOK_S`` for a server that does not answer, once. Until that server has answered, no request waits for
it again. Its last report stands for it, with the reason why that report is not current.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn, TypeVar

import trio
from pydantic import ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger
from vgpu.node.readings import merge_snapshots, restarted, stale
from vgpu.node.servers import ServerProcess
from vgpu.protocol.messages import (
    AnyRequest,
    Forward,
    GetMetrics,
    GetSnapshot,
    MetricsSnapshot,
    Processes,
    ProcessList,
    Snapshot,
    VgpuStatus,
)
from vgpu.protocol.service import AnyModel, ask
from vgpu.spec import explain

log = get_logger(__name__)

LOOK_S: Final = 2.0
"""Clients have time-outs of their own: a scrape of Prometheus often 5 s, ``vgpuctl doctor`` 3 s."""
ASIDE_S: Final = 5.0
AGAIN_S: Final = 1.0
"""Between two requests to a server that is silent: each leaves a link in its queue, which holds 128."""
SILENT: Final = "its server does not answer"
Part = TypeVar("Part")


class StatusCollector:
    """``run`` in a nursery; any task may call the other methods. ``processes``: by the index of the GPU."""

    def __init__(self, processes: Mapping[int, ServerProcess], *, simulated: bool) -> None:
        self._processes = processes
        self._simulated = simulated
        self.replicas: Mapping[str, int] = {}
        """The vGPUs that need replicas, by ``vgpu.node.autoscaling``."""
        self._silent: dict[int, trio.Event] = {}
        """By GPU: the server's ``up`` event when it did not answer. The next server has another event."""
        self._known: frozenset[str] = frozenset()
        """The vGPUs of the last snapshot."""
        self._last: tuple[Snapshot, int] | None = None
        """That snapshot, and when it was complete, on the monotonic clock."""
        self._sending, self._receiving = trio.open_memory_channel[ServerProcess](len(processes))

    async def run(self) -> NoReturn:
        """Wait for the first answer of each silent server."""
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._await_word, await self._receiving.receive())

    # --- what can be asked

    async def snapshot(self) -> Snapshot:
        """The state of all servers. A server that does not answer is represented by its last readings.

        A vGPU that changes its GPU while both servers are asked may be in neither answer. The new GPU's server may have
        answered before the vGPU came, and the old one's after it went. So if a vGPU is missing, the servers are asked
        once more.
        """
        found = merge_snapshots(await self._of_each(self._snapshot_of), time.time())
        if self._known - ids_of(found):
            found = merge_snapshots(await self._of_each(self._snapshot_of), time.time())
        self._known = ids_of(found)
        self._last = found, time.monotonic_ns()
        return found

    async def lately(self, most_s: float) -> tuple[Snapshot, int]:
        """A snapshot of the last ``most_s`` seconds, and when it was complete, on the monotonic clock. The servers are
        asked only if no other task has asked them meanwhile."""
        if self._last is None or time.monotonic_ns() - self._last[1] > most_s * 1e9:
            found = await self.snapshot()
            return found, time.monotonic_ns()
        return self._last

    def note(self, vgpu: VgpuStatus) -> None:
        """A server has admitted or changed this vGPU. So the server's last report has it, whatever happens next."""
        process = self._processes[vgpu.gpu_index]
        if process.last is not None:
            others = tuple(one for one in process.last.vgpus if one.vgpu_id != vgpu.vgpu_id)
            process.last = process.last.model_copy(update={"vgpus": (*others, vgpu)})

    async def meter(self, uid: int) -> MetricsSnapshot:
        """The meters of all servers. Of a server that does not answer, it has only the last snapshot."""

        async def meter(process: ServerProcess) -> MetricsSnapshot:
            now = await self._ask(process, uid, GetMetrics(), MetricsSnapshot)
            if now is None:
                return MetricsSnapshot(snapshot=self._last_of(process), processes=(), gpus=(), vgpus=())
            return now.model_copy(update={"snapshot": self._heard(process, now.snapshot)})

        parts = await self._of_each(meter)
        return MetricsSnapshot(
            snapshot=merge_snapshots([part.snapshot for part in parts], time.time()),
            processes=tuple(process for part in parts for process in part.processes),
            gpus=tuple(gpu for part in parts for gpu in part.gpus),
            vgpus=tuple(vgpu for part in parts for vgpu in part.vgpus),
        )

    async def processes(self, uid: int) -> ProcessList:
        """The processes of all servers. The node waits for a server that restarts, because only that server knows its
        processes."""

        async def list_them(process: ServerProcess) -> ProcessList:
            with trio.move_on_after(LOOK_S):
                await process.up.wait()
            found = await self._ask(process, uid, Processes(), ProcessList)
            return found or ProcessList(processes=(), silent_gpus=(process.index,))

        parts = await self._of_each(list_them)
        found = (process for part in parts for process in part.processes)
        return ProcessList(
            processes=tuple(sorted(found, key=lambda p: (p.gpu_index, p.vgpu_id, p.slot))),
            silent_gpus=tuple(index for part in parts for index in part.silent_gpus),
        )

    # --- how they are asked

    async def _of_each(self, part_of: Callable[[ServerProcess], Awaitable[Part]]) -> list[Part]:
        found: dict[int, Part] = {}

        async def collect(process: ServerProcess) -> None:
            found[process.index] = await part_of(process)

        async with trio.open_nursery() as nursery:
            for process in self._processes.values():
                nursery.start_soon(collect, process)
        return [part for _, part in sorted(found.items())]

    async def _snapshot_of(self, process: ServerProcess) -> Snapshot:
        now = await self._ask(process, os.geteuid(), GetSnapshot(), Snapshot)
        return self._last_of(process) if now is None else self._heard(process, now)

    async def _ask(
        self, process: ServerProcess, uid: int, request: AnyRequest, model: type[AnyModel]
    ) -> AnyModel | None:
        """The answer of one server; None: it does not answer."""
        up = process.up
        if not process.serving or self._silent.get(process.index) is up:
            return None
        try:
            return await ask(process.socket, Forward(uid=uid, request=request), model, LOOK_S)
        except ValidationError as error:
            log.warning("a GPU Server's answer is not understood", gpu=process.index, reason=explain(error))
        except VgpuError as error:
            if error.code is not ErrorCode.TIMEOUT:
                log.warning("no reading", gpu=process.index, reason=str(error))
            elif self._silent.get(process.index) is not up:
                log.warning("GPU Server does not answer", gpu=process.index, pid=process.pid)
                self._silent[process.index] = up
                await self._sending.send(process)
        return None

    async def _await_word(self, process: ServerProcess) -> None:
        up = process.up
        while process.up is up and self._silent.get(process.index) is up:
            try:
                now = await ask(process.socket, Forward(uid=os.geteuid(), request=GetSnapshot()), Snapshot, ASIDE_S)
            except (VgpuError, ValidationError):
                await trio.sleep(AGAIN_S)
                continue
            self._heard(process, now)
            del self._silent[process.index]
            log.info("GPU Server answers again", gpu=process.index, pid=process.pid)

    def _heard(self, process: ServerProcess, snapshot: Snapshot) -> Snapshot:
        process.last = restarted(snapshot, process.restarts, self.replicas)
        return process.last

    def _last_of(self, process: ServerProcess) -> Snapshot:
        """The server's last report, and the reason why it is not current."""
        return stale(
            process.last,
            process.index,
            simulated=self._simulated,
            failed=process.last is None and process.settled.is_set(),
            reason=process.reason or SILENT,
            server={"restarts": process.restarts, "server_pid": process.pid or None},
            at_unix_s=time.time(),
        )


def ids_of(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(vgpu.vgpu_id for vgpu in snapshot.vgpus)
