"""Plans of migrations between the GPUs of a node: to empty a GPU, and to make room for a large request. Pure.

A plan is carried out one move after the other. After each of its moves every vGPU is on a GPU that has room for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vgpu.placement.box import left, promised, ranked, request
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.share import PPM
from vgpu.spec import VgpuSpec

MOST_MOVES = 8
"""Of one plan that makes room: more would disturb more vGPUs than a large one is worth."""


@dataclass(frozen=True, slots=True)
class Move:
    """The vGPU goes from one GPU to another. ``memory_bytes``: what it has on the card, which is copied."""

    vgpu_id: str
    source: int
    target: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``stay``: by vGPU that does not move, the reason. ``gpu``: the GPU that the plan is for."""

    gpu: int
    moves: tuple[Move, ...] = ()
    stay: tuple[tuple[str, str], ...] = ()

    @property
    def copied_bytes(self) -> int:
        return sum(move.memory_bytes for move in self.moves)


def drain(policy: str, gpu: int, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus]) -> Plan:
    """Where the vGPUs of ``gpu`` go: the largest first, each to the GPU that the policy ranks first."""
    board = _Board(policy, gpus, vgpus)
    moves, stay = [], []
    for vgpu in sorted(board.on(gpu), key=_size, reverse=True):
        reason = board.fixed(vgpu)
        target = None if reason else board.target(vgpu, {gpu})
        if target is None:
            stay.append((vgpu.vgpu_id, reason or "no other GPU has room for it"))
            continue
        moves.append(board.move(vgpu, target))
    return Plan(gpu, tuple(moves), tuple(stay))


def make_room(policy: str, spec: VgpuSpec, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus]) -> Plan | None:
    """The plan after which one GPU has room for ``spec``, with the least memory to copy; of equal plans the one with
    fewer moves. A plan without moves: a GPU has room already. None: no plan was found."""
    best: Plan | None = None
    for gpu in _open(gpus):
        plan = _freed(policy, spec, gpu, gpus, vgpus)
        if plan is not None and (best is None or _cost(plan) < _cost(best)):
            best = plan
    return best


def consolidate(policy: str, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus]) -> Plan | None:
    """The plan that empties one GPU, the one with the least to copy, where all its vGPUs have room on GPUs that are in
    use. None: no GPU can be emptied like that."""
    used = {vgpu.gpu_index for vgpu in vgpus}
    best: Plan | None = None
    for gpu in _open(gpus):
        if gpu.index not in used:
            continue
        others = [one for one in gpus if one.index in used]
        plan = drain(policy, gpu.index, others, vgpus)
        if plan.moves and not plan.stay and (best is None or _cost(plan) < _cost(best)):
            best = plan
    return best


def _freed(
    policy: str, spec: VgpuSpec, gpu: GpuStatus, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus]
) -> Plan | None:
    """A plan that makes room on this GPU. It moves the vGPU first that gives most of what is missing for least memory
    to copy."""
    board = _Board(policy, gpus, vgpus)
    asked = request(spec, gpu)
    if asked.memory_bytes > gpu.total_memory_bytes:
        return None
    moves: list[Move] = []
    while not board.has_room(spec, gpu.index):
        if len(moves) == MOST_MOVES:
            return None
        room = left(board.gpus[gpu.index])
        time, memory = asked.time_ppm - room.time_ppm, asked.memory_bytes - room.memory_bytes

        def gain(vgpu: VgpuStatus, time: int = time, memory: int = memory) -> tuple[float, int, str]:
            size = promised(vgpu, gpu)
            part = min(1.0, size.time_ppm / time) if time > 0 else 0.0
            part += min(1.0, size.memory_bytes / memory) if memory > 0 else 0.0
            return part, -vgpu.memory_used_bytes, vgpu.vgpu_id

        for vgpu in sorted((one for one in board.on(gpu.index) if not board.fixed(one)), key=gain, reverse=True):
            target = board.target(vgpu, {gpu.index}) if gain(vgpu)[0] > 0 else None
            if target is not None:
                moves.append(board.move(vgpu, target))
                break
        else:
            return None
    return Plan(gpu.index, tuple(moves))


def _cost(plan: Plan) -> tuple[int, int, int]:
    return plan.copied_bytes, len(plan.moves), plan.gpu


def _size(vgpu: VgpuStatus) -> tuple[float, int, str]:
    return vgpu.guarantee_ratio * vgpu.sm_percent_granted, vgpu.memory_limit_bytes, vgpu.vgpu_id


def _open(gpus: Sequence[GpuStatus]) -> list[GpuStatus]:
    """The GPUs that a vGPU can move to."""
    return [gpu for gpu in gpus if gpu.state == "serving" and gpu.mode == "temporal" and not gpu.draining]


class _Board:
    """The GPUs as they are after the moves so far."""

    def __init__(self, policy: str, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus]) -> None:
        self._policy = policy
        self.gpus = {gpu.index: gpu for gpu in gpus}
        self._vgpus = {vgpu.vgpu_id: vgpu for vgpu in vgpus}

    def on(self, gpu: int) -> list[VgpuStatus]:
        return [vgpu for vgpu in self._vgpus.values() if vgpu.gpu_index == gpu]

    def fixed(self, vgpu: VgpuStatus) -> str:
        """Why the vGPU cannot move; "": it can."""
        source = self.gpus.get(vgpu.gpu_index)
        if vgpu.mode != "temporal":
            return "vGPUs move between GPUs in temporal mode alone"
        if vgpu.state in {"starting", "moving", "removing", "restarting", "failed"}:
            return f"it is {vgpu.state}"
        if source is None or source.state != "serving":
            return "its GPU is not served"
        return ""

    def target(self, vgpu: VgpuStatus, but: Collection[int]) -> int | None:
        """The GPU to which it goes; None: no other has room."""
        group = (vgpu.owner_uid, vgpu.spec.group)
        taken = {
            one.gpu_index
            for one in self._vgpus.values()
            if vgpu.spec.group is not None and (one.owner_uid, one.spec.group) == group and one is not vgpu
        }
        usable = [gpu for gpu in _open(list(self.gpus.values())) if gpu.index not in but and gpu.index not in taken]
        others = [one for one in self._vgpus.values() if one is not vgpu]
        for rank in ranked(self._policy, usable, others, vgpu.spec):
            if rank.reasons:
                return rank.gpu.index
        return None

    def has_room(self, spec: VgpuSpec, gpu: int) -> bool:
        ranks = ranked(self._policy, [self.gpus[gpu]], list(self._vgpus.values()), spec)
        return any(rank.reasons for rank in ranks)

    def move(self, vgpu: VgpuStatus, target: int) -> Move:
        source = vgpu.gpu_index
        self._give(source, vgpu, -1)
        self._give(target, vgpu, 1)
        self._vgpus[vgpu.vgpu_id] = vgpu.model_copy(update={"gpu_index": target})
        return Move(vgpu.vgpu_id, source, target, vgpu.memory_used_bytes - vgpu.memory_away_bytes)

    def _give(self, index: int, vgpu: VgpuStatus, sign: int) -> None:
        gpu = self.gpus[index]
        size = request(vgpu.spec, gpu)
        self.gpus[index] = gpu.model_copy(
            update={
                "guaranteed_ratio": min(1.0, max(0.0, gpu.guaranteed_ratio + sign * size.time_ppm / PPM)),
                "guaranteed_memory_bytes": max(0, gpu.guaranteed_memory_bytes + sign * size.memory_bytes),
            }
        )
