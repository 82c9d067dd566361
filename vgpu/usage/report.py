"""The answer to ``Usage``: rows by user, vGPU or claim, in the units that people read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vgpu.protocol.usage import Grouping, UsageRow
from vgpu.usage.rows import OTHERS, Sums

MOST_ROWS: Final = 1_500
"""In one answer, which may have a megabyte."""
NS_PER_HOUR: Final = 3_600_000_000_000
KIB_S_PER_GIB_HOUR: Final = 3600 << 20
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Part:
    """What one vGPU summed to in one step. ``step``: its number."""

    step: int
    owner_uid: int
    vgpu_id: str
    name: str
    claim: str
    sums: Sums


_Key = tuple[int, int, str, str]
"""Step, owner, vGPU, claim."""


def report(
    parts: Iterable[Part], by: Grouping, since_unix_s: float, step_s: int, most: int = MOST_ROWS
) -> tuple[UsageRow, ...]:
    """The rows by step, and in each step the largest first. If there are too many, each step's smallest rows of a user
    merge into one."""
    found: dict[_Key, Sums] = {}
    names: dict[str, str] = {}
    for part in parts:
        names[part.vgpu_id] = part.name or names.get(part.vgpu_id, "")
        key = _key(part, by)
        found[key] = found.get(key, Sums()) + part.sums
    steps = len({key[0] for key in found}) or 1
    found = _fewer(found, max(1, most // steps))
    rows = sorted(found.items(), key=lambda item: (item[0][0], -_size(item[1]), item[0]))
    return tuple(_row(key, sums, names, since_unix_s + key[0] * step_s) for key, sums in rows)


def _key(part: Part, by: Grouping) -> _Key:
    match by:
        case "vgpu":
            return part.step, part.owner_uid, part.vgpu_id, part.claim
        case "claim":
            return part.step, part.owner_uid, "", part.claim
        case _:
            return part.step, part.owner_uid, "", ""


def _fewer(found: Mapping[_Key, Sums], most_of_step: int) -> dict[_Key, Sums]:
    """The largest ``most_of_step`` rows over all steps. The others merge by step and user."""
    wholes: dict[_Key, int] = {}
    for (_, owner_uid, vgpu_id, claim), sums in found.items():
        key = (0, owner_uid, vgpu_id, claim)
        wholes[key] = wholes.get(key, 0) + _size(sums)
    if len(wholes) <= most_of_step:
        return dict(found)
    users = len({owner for _, owner, _, _ in wholes})
    kept = set(sorted(wholes, key=lambda key: -wholes[key])[: max(0, most_of_step - users)])
    merged: dict[_Key, Sums] = {}
    for key, sums in found.items():
        step, owner_uid, vgpu_id, claim = key
        into = key if (0, owner_uid, vgpu_id, claim) in kept else (step, owner_uid, OTHERS, "")
        merged[into] = merged.get(into, Sums()) + sums
    return merged


def _size(sums: Sums) -> int:
    return sums.promised_ns + sums.used_ns


def _row(key: _Key, sums: Sums, names: Mapping[str, str], start_unix_s: float) -> UsageRow:
    _, owner_uid, vgpu_id, claim = key
    return UsageRow(
        start_unix_s=start_unix_s,
        owner_uid=owner_uid,
        vgpu_id=vgpu_id,
        name=names.get(vgpu_id, ""),
        claim=claim,
        measured_hours=_hours(sums.measured_ns),
        promised_gpu_hours=_hours(sums.promised_ns),
        used_gpu_hours=_hours(sums.used_ns),
        wasted_gpu_hours=_hours(sums.wasted_ns),
        memory_promised_gib_hours=round(sums.memory_promised_kib_s / KIB_S_PER_GIB_HOUR, _DIGITS),
        memory_used_gib_hours=round(sums.memory_used_kib_s / KIB_S_PER_GIB_HOUR, _DIGITS),
    )


def _hours(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_HOUR, _DIGITS)
