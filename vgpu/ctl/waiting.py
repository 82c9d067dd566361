"""The programs that are affected when a node stops, and what ends their wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from vgpu.enums import OnServerLoss
from vgpu.protocol.messages import ProcessReading, VgpuStatus
from vgpu.units import counted

MOST_NAMED: Final = 5
FEELS: Final = {
    OnServerLoss.BLOCK: "wait until a node serves again",
    OnServerLoss.ERROR: "get errors from CUDA from now on",
    OnServerLoss.RUN: "run without limits until a node serves again",
}
ONE_FEELS: Final = {
    OnServerLoss.BLOCK: "waits until a node serves again",
    OnServerLoss.ERROR: "gets errors from CUDA from now on",
    OnServerLoss.RUN: "runs without limits until a node serves again",
}


def who_feels_it(vgpus: Iterable[VgpuStatus], processes: Iterable[ProcessReading]) -> list[str]:
    """A sentence for each kind of consequence; none if no program runs."""
    running: dict[str, list[ProcessReading]] = {}
    for process in processes:
        if process.alive:
            running.setdefault(process.vgpu_id, []).append(process)
    groups: dict[OnServerLoss, list[VgpuStatus]] = {}
    for vgpu in vgpus:
        if vgpu.vgpu_id in running:
            groups.setdefault(vgpu.spec.on_server_loss, []).append(vgpu)
    return [_sentence(loss, groups[loss], running) for loss in OnServerLoss if loss in groups]


def _sentence(loss: OnServerLoss, vgpus: Sequence[VgpuStatus], running: dict[str, list[ProcessReading]]) -> str:
    programs = [(vgpu, process) for vgpu in vgpus for process in running[vgpu.vgpu_id]]
    named = [
        f"{process.command or 'a program'} (pid {process.pid}, {vgpu.name or vgpu.vgpu_id})"
        for vgpu, process in programs[:MOST_NAMED]
    ]
    more = f" and {len(programs) - MOST_NAMED} more" if len(programs) > MOST_NAMED else ""
    feels = (ONE_FEELS if len(programs) == 1 else FEELS)[loss]
    return f"{counted(len(programs), 'program')} in {counted(len(vgpus), 'vGPU')} {feels}: {', '.join(named)}{more}"
