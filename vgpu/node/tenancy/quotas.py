"""The quotas of a node: the sections of its configuration, and what the users' vGPUs take of them now."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vgpu.errors import VgpuError
from vgpu.groups import Groups
from vgpu.node.sources import Owners, Source
from vgpu.protocol.messages import GpuStatus, Snapshot, VgpuStatus
from vgpu.protocol.tenancy import QuotaHeld, QuotaReading
from vgpu.quotas.checks import NOTHING, Amount, Held, amount, check, over, with_defaults
from vgpu.quotas.quota import QUOTA_FIELDS, Allowance, Quota, Quotas, User
from vgpu.spec import VgpuSpec


class NodeQuotas:
    """``quotas`` may be replaced at any time. ``owners``: of subordinate uids, whose vGPUs count as their owner's."""

    def __init__(self, quotas: Quotas, owners: Callable[[], Owners]) -> None:
        self.quotas = quotas
        self._owners = owners
        self._groups = Groups()

    @property
    def is_trivial(self) -> bool:
        return self.quotas.is_trivial

    @property
    def has_idle_limits(self) -> bool:
        quotas = self.quotas
        return any(one.idle_limit_ns for one in (quotas, *quotas.user.values(), *quotas.group.values()))

    async def allowance(self, uid: int) -> Allowance:
        """What holds for user ``uid``. ``VgpuError`` (unavailable): the name service does not answer, and a quota needs
        the names."""
        quotas, source = self.quotas, self.source(uid)
        named = bool(quotas.user or quotas.group)
        if isinstance(source, str):
            user = User(uid, source)
        elif named:
            name, groups = await self._groups.user(source)
            user = User(source, name, groups)
        else:
            user = User(source)
        return quotas.of(replace(user, is_exempt=source in {0, os.geteuid()}))

    def filled(self, spec: VgpuSpec, allowance: Allowance, existing: VgpuStatus | None) -> VgpuSpec:
        """``spec`` with the user's defaults. What a vGPU of the same claim has got already stays as it is."""
        spec = with_defaults(spec, allowance.quota)
        if existing is None:
            return spec
        given = {name: getattr(existing.spec, name) for name in _DEFAULTED if name not in spec.model_fields_set}
        return spec.model_copy(update=given)

    def check(
        self,
        spec: VgpuSpec,
        gpu: GpuStatus,
        allowance: Allowance,
        snapshot: Snapshot,
        *,
        claim: str = "",
        before: VgpuStatus | None = None,
    ) -> None:
        """``VgpuError`` (quota): a new vGPU, or a changed one (``before``), does not fit. An amount of which a change
        asks for no more than before is never a reason."""
        if self.quotas.is_trivial:
            return
        but = "" if before is None else before.vgpu_id
        of_claim = self.quotas.of_claim(claim) if claim else None
        if before is not None:
            old = before.spec
            allowance = replace(allowance, quota=_stricter(allowance.quota, spec, old, gpu.total_memory_bytes))
            of_claim = None if of_claim is None else _stricter(of_claim, spec, old, gpu.total_memory_bytes)
        by_user, by_claim = self.held_now(snapshot, but)
        held = by_user.get(self.source(allowance.user.uid), NOTHING)
        of_claims = None if of_claim is None else (claim, of_claim, by_claim.get(claim, NOTHING))
        check(spec, gpu.total_memory_bytes, allowance, held, of_claims)

    def refusal(
        self,
        spec: VgpuSpec,
        gpus: Sequence[GpuStatus],
        allowance: Allowance,
        claim: str,
        held: Held = NOTHING,
        held_by_claims: Held = NOTHING,
    ) -> VgpuError | None:
        """Why it fits the quota on none of these GPUs, beside what is held; None: it fits. With nothing held: why it
        never fits."""
        refusal: VgpuError | None = None
        of_claim = self.quotas.of_claim(claim) if claim else None
        for memory in dict.fromkeys(gpu.total_memory_bytes for gpu in gpus):
            try:
                check(spec, memory, allowance, held, None if of_claim is None else (claim, of_claim, held_by_claims))
            except VgpuError as error:
                refusal = refusal or error
            else:
                return None
        return refusal

    def held_now(self, snapshot: Snapshot, but: str = "") -> tuple[dict[Source, Held], dict[str, Held]]:
        """What each user has, and what all vGPUs of each kind of claim have. ``but``: a vGPU that does not count."""
        by_user, by_claim = defaultdict[Source, list[Amount]](list), defaultdict[str, list[Amount]](list)
        for vgpu, taken in _amounts(snapshot, but):
            by_user[self.source(vgpu.owner_uid)].append(taken)
            by_claim[taken.claim].append(taken)
        return (
            {user: Held.of(found) for user, found in by_user.items()},
            {kind: Held.of(found) for kind, found in by_claim.items()},
        )

    async def over(self, snapshot: Snapshot) -> tuple[str, ...]:
        """The vGPUs of users that have more than their quota allows now."""
        found: list[str] = []
        memory = {gpu.index: gpu.total_memory_bytes for gpu in snapshot.gpus}
        by_user = defaultdict[Source, list[tuple[VgpuStatus, Amount]]](list)
        for vgpu, taken in _amounts(snapshot):
            by_user[self.source(vgpu.owner_uid)].append((vgpu, taken))
        for own in by_user.values():
            quota = (await self.allowance(own[0][0].owner_uid)).quota
            found += over(quota, [(vgpu.vgpu_id, vgpu.spec, taken, memory[vgpu.gpu_index]) for vgpu, taken in own])
        return tuple(found)

    def reading(self, allowance: Allowance, snapshot: Snapshot) -> QuotaReading:
        """What the user may have, and has."""
        held = self.held_now(snapshot)[0].get(self.source(allowance.user.uid), NOTHING)
        return QuotaReading(
            uid=allowance.user.uid,
            user=allowance.user.name,
            quota=allowance.quota.model_dump(mode="json", by_alias=True, exclude_none=True),
            sections={Quota.model_fields[name].alias or name: section for name, section in allowance.sections.items()},
            held=QuotaHeld(sm_percent=held.promised_percent, memory_bytes=held.memory_bytes, vgpus=held.vgpus),
        )

    def source(self, uid: int) -> Source:
        return self._owners().source_of(uid)


_DEFAULTED = ("memory_bytes", "ttl_ns", "idle_suspend_ns", "priority")


def _amounts(snapshot: Snapshot, but: str = "") -> Iterable[tuple[VgpuStatus, Amount]]:
    memory = {gpu.index: gpu.total_memory_bytes for gpu in snapshot.gpus}
    for vgpu in snapshot.vgpus:
        if vgpu.vgpu_id != but:
            claim = "" if vgpu.claim is None else vgpu.claim.kind
            yield vgpu, amount(vgpu.spec, memory.get(vgpu.gpu_index, 0), claim)


def _stricter(quota: Quota, new: VgpuSpec, old: VgpuSpec, total_memory_bytes: int) -> Quota:
    """The part of ``quota`` that counts for a change: the amounts of which ``new`` asks for more than ``old``."""
    more, less = amount(new, total_memory_bytes), amount(old, total_memory_bytes)
    forever = 1 << 80
    grows = {
        "sm_percent": new.compute_ratio > old.compute_ratio,
        "memory_bytes": max(more.memory_bytes, new.memory_limit_bytes or 0)
        > max(less.memory_bytes, old.memory_limit_bytes or 0),
        "sm_total_percent": more.promised_percent > less.promised_percent,
        "memory_total_bytes": more.memory_bytes > less.memory_bytes,
        "ttl_ns": (new.ttl_ns or forever) > (old.ttl_ns or forever),
    }
    kept = {name: getattr(quota, name) for name in QUOTA_FIELDS if grows.get(name)}
    return Quota.model_construct({name for name, value in kept.items() if value is not None}, **kept)
