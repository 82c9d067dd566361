"""The vGPU that a reference names, and the GPU for a new vGPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.placement.box import ranked
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.spec import VgpuSpec


def find_vgpu(reference: str, vgpus: Sequence[VgpuStatus], uid: int | None = None) -> VgpuStatus:
    """The vGPU that ``reference`` of user ``uid`` names (``vgpu-`` may be left out of an id): the first of

    * an id,
    * a name of a vGPU of that user,
    * a prefix of an id of a vGPU of that user,
    * a name, or a prefix of an id, of any vGPU.

    So no user's name stands for a vGPU of another one. ``uid`` None: every vGPU is that user's. Errors: ``not-found``;
    ``ambiguous`` where several fit.
    """
    prefix = reference if reference.startswith("vgpu-") else f"vgpu-{reference}"
    own = [vgpu for vgpu in vgpus if uid is None or vgpu.owner_uid == uid]
    fitting = [vgpu for vgpu in vgpus if vgpu.vgpu_id == prefix]
    if reference:
        # Several may have the name: a GPU may not have been served when the second vGPU got that name.
        fitting = fitting or [vgpu for vgpu in own if vgpu.name == reference]
        fitting = fitting or [vgpu for vgpu in own if vgpu.vgpu_id.startswith(prefix)]
        fitting = fitting or [v for v in vgpus if v.name == reference or v.vgpu_id.startswith(prefix)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        ids = ", ".join(vgpu.vgpu_id for vgpu in fitting[:4])
        raise VgpuError(ErrorCode.AMBIGUOUS, f"{reference!r} fits {len(fitting)} vGPUs ({ids})", "write the id")
    raise VgpuError(ErrorCode.NOT_FOUND, f"there is no vGPU {reference!r}", "see: vgpuctl ls")


def merge_migrating(vgpus: Sequence[VgpuStatus]) -> tuple[VgpuStatus, ...]:
    """Each vGPU once. Two servers may report a vGPU that moves. Then the report of the server that has it counts, and
    not that of the server that it leaves, or of a server that restarts."""
    sure = {vgpu.vgpu_id for vgpu in vgpus if is_sure(vgpu)}
    merged: dict[str, VgpuStatus] = {}
    for vgpu in vgpus:
        if is_sure(vgpu) or vgpu.vgpu_id not in sure | merged.keys():
            merged[vgpu.vgpu_id] = vgpu
    return tuple(merged.values())


def is_sure(vgpu: VgpuStatus) -> bool:
    return vgpu.leaving_to is None and vgpu.state != "restarting"


def candidates(
    choice: str,
    gpus: Sequence[GpuStatus],
    vgpus: Sequence[VgpuStatus],
    spec: VgpuSpec,
    placement: PlacementName = PlacementName.SPREAD,
) -> list[GpuStatus]:
    """The GPUs to try, in this order. "auto": all that serve, by the policy ``placement``. Otherwise the one that is
    named, as in ``serving``. Errors: ``not-found``, ``ambiguous``, ``unavailable``; ``no-room``: all are drained."""
    if choice.lower() != "auto":
        return [serving(choice, gpus)]
    open_ones = [gpu for gpu in all_serving(gpus) if not gpu.draining]
    if not open_ones:
        raise VgpuError(
            ErrorCode.NO_ROOM, "every GPU of this node is drained, and takes no vGPU", "vgpuctl gpu undrain GPU"
        )
    return [rank.gpu for rank in ranked(placement, open_ones, vgpus, spec)]


def all_serving(gpus: Sequence[GpuStatus]) -> list[GpuStatus]:
    """The GPUs that serve. Error: ``unavailable``, if none does."""
    found = [gpu for gpu in gpus if gpu.state == "serving"]
    if not found:
        raise VgpuError(ErrorCode.UNAVAILABLE, "no GPU is served at this moment", "see: vgpuctl gpu ls")
    return found


def serving(choice: str, gpus: Sequence[GpuStatus]) -> GpuStatus:
    """The GPU by its index, or a UUID in any case (a prefix will do, with or without ``GPU-``). Errors: ``not-found``,
    ``ambiguous``, ``unavailable``."""
    gpu = find_gpu(choice, gpus)
    if gpu.state != "serving":
        reason = gpu.reason or gpu.state
        raise VgpuError(ErrorCode.UNAVAILABLE, f"GPU {gpu.index} is not served: {reason}", "see: vgpuctl gpu ls")
    return gpu


def find_gpu(choice: str, gpus: Sequence[GpuStatus]) -> GpuStatus:
    known = f"this node has GPU {', '.join(str(gpu.index) for gpu in gpus)}" if gpus else "this node has none"
    if choice.isdecimal():
        fitting = [gpu for gpu in gpus if gpu.index == int(choice)]
    else:
        wanted = choice.lower().removeprefix("gpu-")
        fitting = [gpu for gpu in gpus if wanted and gpu.uuid.lower().removeprefix("gpu-").startswith(wanted)]
    if not fitting:
        raise VgpuError(ErrorCode.NOT_FOUND, f"there is no GPU {choice!r}; {known}", "see: vgpuctl gpu ls")
    if len(fitting) > 1:
        raise VgpuError(
            ErrorCode.AMBIGUOUS, f"{choice!r} fits {len(fitting)} GPUs", "write more of the UUID, or the index"
        )
    return fitting[0]
