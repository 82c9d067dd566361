"""Suspending a vGPU: its programs stand still, and what they have on the GPU goes to the host's memory, until it is
resumed. By the driver's checkpoints of whole processes (gpuserver/device/checkpoint.py), in temporal mode.

In the order in which a crash leaves nothing worse than a vGPU that is suspended although its programs run: it gets no
lease any more, new programs are turned away, the journal says so, and then the driver is asked. Back the other way
round. Either may be asked again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from gpuserver.core.leases import Mode
from vgpu.errors import ErrorCode, VgpuError
from vgpu.units import counted, format_bytes

if TYPE_CHECKING:
    from gpuserver.runtime.server import GpuServer
    from gpuserver.runtime.vgpus import Vgpu

BROKER_S: Final = 10.0
_NOT_FOR_THE_DRIVER: Final = frozenset({"LD_PRELOAD", "VGPU_ID", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"})


class Suspension:
    """``suspend`` and ``resume`` one vGPU of ``server``; one after the other where both are asked for."""

    def __init__(self, server: GpuServer) -> None:
        self._server = server

    async def suspend(self, vgpu: Vgpu) -> None:
        """Errors: ``mode`` (spatial), ``in-use`` for programs of several vGPUs, ``unavailable`` with the driver's
        reason; the vGPU goes on then."""
        server, vgpu_id = self._server, vgpu.record.vgpu_id
        self._check(vgpu)
        async with vgpu.turn:
            if vgpu.removed.is_set():
                raise VgpuError(ErrorCode.REMOVED, f"{vgpu_id} is being removed")
            if vgpu.record.suspended:
                return
            used = vgpu.used_bytes
            vgpu.stand_still()
            server.tokens.bench(vgpu.record.key)
            await self._tell(vgpu)
            try:
                seconds = await self._ask_driver("suspend", vgpu)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self._go_on(vgpu)
                raise
            server.registry.suspend(vgpu_id)  # others may have its place from now on
            server.apply_shares()
        programs = counted(len(vgpu.alive), "program")
        text = f"{vgpu_id} suspended: {programs}, {format_bytes(used)} in {seconds:.1f} s"
        server.happened("suspended", vgpu, text, memory_bytes=used, seconds=seconds)

    async def resume(self, vgpu: Vgpu) -> None:
        """Errors: ``no-room`` where others were promised its share or memory meanwhile, ``unavailable`` with the
        driver's reason; it stays suspended then."""
        server, vgpu_id = self._server, vgpu.record.vgpu_id
        async with vgpu.turn:
            if not vgpu.still:
                return
            if vgpu.record.suspended:
                server.count_occupied()
                server.registry.resume(vgpu_id)  # promised before anything moves
            try:
                seconds = await self._ask_driver("resume", vgpu)
            except BaseException:
                server.registry.suspend(vgpu_id)
                raise
            await self._go_on(vgpu)
        programs = counted(len(vgpu.alive), "program")
        server.happened("resumed", vgpu, f"{vgpu_id} resumed: {programs} in {seconds:.1f} s", seconds=seconds)

    async def let_go(self, vgpu: Vgpu) -> None:
        """It is being removed: its programs are to find out, instead of standing still for ever."""
        try:
            async with vgpu.turn:
                await self._ask_driver("resume", vgpu)
        except VgpuError as error:
            pids = ", ".join(str(slot.pid) for slot in vgpu.alive)
            text = f"{vgpu.record.vgpu_id} was removed, and its programs stand still for ever: {error}: kill {pids}"
            self._server.happened("stranded", vgpu, text)

    def _check(self, vgpu: Vgpu) -> None:
        vgpu_id = vgpu.record.vgpu_id
        if self._server.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                f"{vgpu_id} is on a GPU in spatial mode, and processes under MPS cannot be suspended",
                "vgpuctl gpu set GPU --mode temporal",
            )
        if vgpu.companies:
            others = sorted({other for company in vgpu.companies.values() for other in company} - {vgpu_id})
            raise VgpuError(
                ErrorCode.IN_USE,
                f"programs of {vgpu_id} are in {', '.join(others)}, too, and cannot stand still in one of them",
                "end them first: vgpuctl ps",
            )

    async def _tell(self, vgpu: Vgpu) -> None:
        """Scheduler, broker and journal."""
        self._server.apply_shares()
        await self._server.brokers.changed(vgpu)
        await self._server.remember()

    async def _go_on(self, vgpu: Vgpu) -> None:
        """It may have leases again, unless it was removed meanwhile."""
        if not vgpu.removed.is_set():
            vgpu.stand_still(False)
            await self._tell(vgpu)
            self._server.tokens.unbench(vgpu.record.key, vgpu.share)
            self._server.memory.expect_growth()  # its contexts are back

    async def _ask_driver(self, action: str, vgpu: Vgpu) -> float:
        """Seconds it took."""
        with trio.move_on_after(BROKER_S):
            await vgpu.registered.wait()
        if vgpu.activity is None:  # whose processes it has only the page tells, which its broker has kept
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the broker of {vgpu.record.vgpu_id} is not back yet", "try again")
        pids = [str(slot.pid) for slot in vgpu.alive]
        if not pids:
            return 0.0
        argv = [sys.executable, "-m", "gpuserver.device.checkpoint", str(os.getpid()), action, *pids]
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_DRIVER}
        with trio.CancelScope(shield=True):  # half done is worse than late
            ran = await trio.to_thread.run_sync(
                partial(subprocess.run, argv, env=environment, capture_output=True, text=True, check=False)
            )
        try:
            told = json.loads(ran.stdout)
        except ValueError:
            last = ran.stderr.strip().rpartition("\n")[2]
            told = {"done": False, "reason": last or f"the driver's calls ended with {ran.returncode}"}
        if not told["done"]:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"{vgpu.record.vgpu_id} is as it was: {told['reason']}")
        return float(told["seconds"])
