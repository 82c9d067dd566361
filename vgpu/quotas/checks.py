"""Whether a new or changed vGPU fits the quotas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.quotas.quota import OF_ONE_REQUEST, Allowance, Quota
from vgpu.spec import VgpuSpec
from vgpu.units import counted, format_bytes, format_duration

HINT: Final = "see what you may have: vgpuctl quota"


@dataclass(frozen=True, slots=True)
class Amount:
    """What one vGPU takes of a quota. ``promised_percent``: of one GPU's compute, guaranteed; ``memory_bytes``:
    promised. ``claim``: the kind of its claim, "" without one."""

    promised_percent: float
    memory_bytes: int
    claim: str = ""


def amount(spec: VgpuSpec, total_memory_bytes: int, claim: str = "") -> Amount:
    """What a vGPU with ``spec`` takes on a GPU with ``total_memory_bytes``, overcommitted or not."""
    promised = spec.compute_ratio * spec.quota_request_ratio * 100
    return Amount(promised, spec.memory_on(total_memory_bytes), claim)


@dataclass(frozen=True, slots=True)
class Held:
    """The vGPUs that a quota counts, together."""

    promised_percent: float = 0.0
    memory_bytes: int = 0
    vgpus: int = 0

    @classmethod
    def of(cls, amounts: Iterable[Amount]) -> Held:
        found = list(amounts)
        return cls(sum(one.promised_percent for one in found), sum(one.memory_bytes for one in found), len(found))


NOTHING: Final = Held()


def with_defaults(spec: VgpuSpec, quota: Quota) -> VgpuSpec:
    """``spec`` with the quota's defaults where it does not say. A vGPU without a time to live gets the longest one."""
    said = spec.model_fields_set
    filled: dict[str, object] = {}
    if spec.memory_bytes is None and spec.fraction is None and quota.default_memory_bytes is not None:
        filled["memory_bytes"] = quota.default_memory_bytes
    if spec.ttl_ns is None and quota.ttl_ns is not None:
        filled["ttl_ns"] = quota.ttl_ns
    if "idle_suspend_ns" not in said and quota.default_idle_suspend_ns:
        filled["idle_suspend_ns"] = quota.default_idle_suspend_ns
    if "priority" not in said and quota.default_priority is not None:
        filled["priority"] = quota.default_priority
    return VgpuSpec.parse(**(spec.model_dump(exclude_unset=True) | filled)) if filled else spec


def check_one(spec: VgpuSpec, total_memory_bytes: int, quota: Quota, section: str) -> None:
    """``VgpuError`` (quota): the vGPU alone is more than the quota allows one vGPU. It never fits."""
    share, memory = spec.compute_ratio * 100, spec.memory_on(total_memory_bytes)
    largest = max(memory, spec.memory_limit_bytes or 0)
    if quota.sm_percent is not None and share > quota.sm_percent + _ROUNDING:
        raise _refused(
            f"the largest vGPU by the quota of {section} has {quota.sm_percent:g} % of a GPU, and you ask for "
            f"{share:g} %",
            f"--sm {quota.sm_percent:g}",
        )
    if quota.memory_bytes is not None and largest > quota.memory_bytes:
        most = format_bytes(quota.memory_bytes)
        raise _refused(
            f"the largest vGPU by the quota of {section} has {most} of memory, and you ask for {format_bytes(largest)}",
            f"--mem {most.replace(' ', '')}",
        )
    if quota.ttl_ns is not None and (spec.ttl_ns is None or spec.ttl_ns > quota.ttl_ns):
        longest = format_duration(quota.ttl_ns)
        asked = "none" if spec.ttl_ns is None else format_duration(spec.ttl_ns)
        raise _refused(
            f"the longest time to live by the quota of {section} is {longest}, and you ask for {asked}",
            f"--ttl {longest}",
        )
    never = Held()
    check_together(amount(spec, total_memory_bytes), never, quota, section, "this vGPU")


def check_together(new: Amount, held: Held, quota: Quota, section: str, whose: str) -> None:
    """``VgpuError`` (quota): together with what is ``held`` it is more than the quota allows. ``whose``: the subject of
    the sentence, as in "ann"."""
    if quota.vgpus is not None and held.vgpus + 1 > quota.vgpus:
        raise _refused(
            f"{whose} has {counted(held.vgpus, 'vGPU')} of the {quota.vgpus} that the quota of {section} allows",
            "remove one: vgpuctl rm ID",
        )
    most = quota.sm_total_percent
    if most is not None and held.promised_percent + new.promised_percent > most + _ROUNDING:
        left = max(0.0, most - held.promised_percent)
        raise _refused(
            f"{whose} has {held.promised_percent:g} % of the {most:g} % of a GPU that the quota of {section} allows: "
            f"{left:g} % are left, and this vGPU asks for {new.promised_percent:g} %",
            f"--sm {left:g}, or remove one: vgpuctl rm ID" if left >= 1 else "remove one: vgpuctl rm ID",
        )
    bytes_most = quota.memory_total_bytes
    if bytes_most is not None and held.memory_bytes + new.memory_bytes > bytes_most:
        free = max(0, bytes_most - held.memory_bytes)
        raise _refused(
            f"{whose} has {format_bytes(held.memory_bytes)} of the {format_bytes(bytes_most)} of memory that the quota "
            f"of {section} allows: {format_bytes(free)} are left, and this vGPU asks for "
            f"{format_bytes(new.memory_bytes)}",
            "give less --mem, or remove one: vgpuctl rm ID",
        )


def check(
    spec: VgpuSpec, total_memory_bytes: int, allowance: Allowance, held: Held, claim: tuple[str, Quota, Held] | None
) -> None:
    """``VgpuError`` (quota): the vGPU does not fit the user's quota, or that of its claim's kind. ``held``: what the
    user has without this vGPU; ``claim``: kind, quota, and what all vGPUs of that kind have."""
    new = amount(spec, total_memory_bytes)
    for name, part in _parts(allowance.quota):
        section = allowance.sections.get(name, "everyone")
        check_one(spec, total_memory_bytes, part, section)
        check_together(new, held, part, section, allowance.user.shown)
    if claim is not None:
        kind, of_claims, held_by_claims = claim
        section = f"claims of kind {kind}"
        check_one(spec, total_memory_bytes, of_claims, section)
        check_together(new, held_by_claims, of_claims, section, f"claims of kind {kind} together")


@lru_cache(1024)
def _parts(quota: Quota) -> tuple[tuple[str, Quota], ...]:
    """The quota's keys that bound a vGPU, each as a quota of its own."""
    named = sorted(name for name in OF_ONE_REQUEST if getattr(quota, name) is not None)
    return tuple((name, Quota.model_construct({name}, **{name: getattr(quota, name)})) for name in named)


def over(quota: Quota, vgpus: Sequence[tuple[str, VgpuSpec, Amount, int]]) -> list[str]:
    """The vGPUs of one user that the quota would refuse now: those that are too large alone, and all where they are too
    much together. Each: id, specification, amount, memory of its card."""
    held = Held.of(taken for _, _, taken, _ in vgpus)
    together = (
        (quota.vgpus, held.vgpus),
        (quota.sm_total_percent, held.promised_percent - _ROUNDING),
        (quota.memory_total_bytes, held.memory_bytes),
    )
    if any(most is not None and has > most for most, has in together):
        return [vgpu_id for vgpu_id, _, _, _ in vgpus]
    found = []
    for vgpu_id, spec, _, total_memory_bytes in vgpus:
        try:
            check_one(spec, total_memory_bytes, quota, "")
        except VgpuError:
            found.append(vgpu_id)
    return found


_ROUNDING: Final = 1e-6


def _refused(message: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.QUOTA, message, f"{hint}; {HINT}")
