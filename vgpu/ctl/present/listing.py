"""Which vGPUs ``vgpuctl ls`` lists, and in which order. Pure, but for users."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from vgpu.ctl.present import tables
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.routing import find_vgpu

if TYPE_CHECKING:
    from vgpu.protocol.messages import VgpuStatus

WORDS: Final[dict[str, Callable[[VgpuStatus], str]]] = {
    "id": lambda vgpu: vgpu.vgpu_id,
    "name": lambda vgpu: vgpu.name or "",
    "gpu": lambda vgpu: str(vgpu.gpu_index),
    "state": lambda vgpu: tables.shown_state(vgpu),
    "owner": lambda vgpu: tables.user_name(vgpu.owner_uid),
    "mode": lambda vgpu: vgpu.mode,
    "group": lambda vgpu: vgpu.spec.group or "",
}
"""What ``--filter`` compares; ``--sort`` puts A before Z."""
FIGURES: Final[dict[str, Callable[[VgpuStatus], float]]] = {
    "share": lambda vgpu: vgpu.guarantee_ratio * vgpu.sm_percent_granted,
    "used": lambda vgpu: vgpu.busy_ratio,
    "memory": lambda vgpu: vgpu.memory_used_bytes,
    "procs": lambda vgpu: vgpu.processes,
    "needs": lambda vgpu: vgpu.demand_ratio,
    "slo": tables.missed,
    "peak": lambda vgpu: vgpu.memory_peak_bytes,
    "refused": lambda vgpu: vgpu.memory_refusals,
    "age": lambda vgpu: -vgpu.created_unix_s,
}
"""What ``--sort`` knows besides; it puts the largest first."""

Choice = Callable[["Iterable[VgpuStatus]"], "list[VgpuStatus]"]


def chosen(filters: Sequence[str], sort: str) -> Choice:
    """A function that picks the vGPUs for which all ``filters`` hold (``KEY=VALUE``, with ``*`` and ``?``), in the
    order of ``sort`` ("": as they come). ``VgpuError`` (invalid): there is no such key."""
    conditions = [_condition(one) for one in filters]
    if sort and sort not in WORDS | FIGURES:
        raise _unknown("--sort", sort, [*WORDS, *FIGURES])

    def choose(vgpus: Iterable[VgpuStatus]) -> list[VgpuStatus]:
        found = [vgpu for vgpu in vgpus if all(fnmatchcase(WORDS[key](vgpu), value) for key, value in conditions)]
        if sort in WORDS:
            return sorted(found, key=WORDS[sort])
        return sorted(found, key=FIGURES[sort], reverse=True) if sort else found

    return choose


def named(
    names: Sequence[str] | None, vgpus: Iterable[VgpuStatus], *, missing_is_error: bool = False
) -> list[VgpuStatus]:
    """The vGPUs that ``names`` name (``find_vgpu``); all of them if ``names`` is empty."""
    everything = list(vgpus)
    if not names:
        return everything
    found: list[VgpuStatus] = []
    for name in names:
        try:
            vgpu = find_vgpu(name, everything, os.geteuid())
        except VgpuError:
            if missing_is_error:
                raise
            continue
        if vgpu not in found:
            found.append(vgpu)
    return found


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise VgpuError(ErrorCode.INVALID, f"--filter {text!r} is not KEY=VALUE", "vgpuctl ls --filter state=idle")
    if key not in WORDS:
        raise _unknown("--filter", key, WORDS)
    return key, value


def _unknown(option: str, key: str, known: Iterable[str]) -> VgpuError:
    return VgpuError(ErrorCode.INVALID, f"{option} knows no {key!r}", f"one of: {', '.join(known)}")
