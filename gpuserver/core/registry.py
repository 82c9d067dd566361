"""The vGPUs of one GPU: what exists, what it was promised, and what else would fit. Sans I/O.

Theory of operation
-------------------
Every change is decided on a copy and committed whole: a request that is refused (``VgpuError``) has changed nothing.
A record holds what a person asked for (``spec``) and what it means on this card and in this mode (``share``,
``memory_limit_bytes``, ``partition``). Changing the mode of the GPU re-derives the meaning of every record.

Invariants (``check``): keys and names are unique, keys lie within the relay page, Σ memory limits ≤ the card, every
record means what its specification says, and without overcommitment the guarantees can all be kept at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gpuserver.core.leases import Mode, Priority, Share, VgpuKey
from gpuserver.core.partition import Partition, partition
from vgpu.errors import ErrorCode, VgpuError
from vgpu.spec import VgpuChanges, VgpuSpec
from vgpu.units import format_bytes

MAX_VGPUS = 256
PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Card:
    """The physical GPU as the registry sees it. ``sm_count`` 0: unknown, then spatial mode is refused."""

    total_memory_bytes: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Who made a vGPU. ``share_gid``: group that may attach too, −1: none."""

    uid: int
    share_gid: int = -1


@dataclass(frozen=True, slots=True)
class VgpuRecord:
    """One vGPU. ``expires_unix_ns`` None: never."""

    vgpu_id: str
    key: VgpuKey
    spec: VgpuSpec
    owner: Owner
    created_unix_ns: int
    expires_unix_ns: int | None
    share: Share
    memory_limit_bytes: int
    partition: Partition | None  # spatial mode only


Fits = Callable[[Mode, Sequence[Share]], str]
"""Whether these guarantees can all be kept: "" or the reason why not. ``admission.py`` has the policy's answer."""


class Registry:
    """All vGPUs of one GPU."""

    def __init__(self, card: Card, mode: Mode, fits: Fits) -> None:
        self.card = card
        self.mode = mode
        self._fits = fits
        self._records: dict[str, VgpuRecord] = {}

    def __iter__(self) -> Iterator[VgpuRecord]:
        """In the order of creation."""
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, vgpu_id: object) -> bool:
        return vgpu_id in self._records

    def __getitem__(self, vgpu_id: str) -> VgpuRecord:
        return self._records[vgpu_id]

    @property
    def guaranteed_memory_bytes(self) -> int:
        return sum(record.memory_limit_bytes for record in self)

    @property
    def guaranteed_ppm(self) -> int:
        """Σ of what was guaranteed, in GPU time × SMs: parts per million of the card."""
        return sum(r.share.guarantee_ppm * r.share.sm_mpercent for r in self if not r.spec.overcommit) // 100_000

    # --- changes

    def create(self, vgpu_id: str, spec: VgpuSpec, owner: Owner, now_unix_ns: int) -> VgpuRecord:
        """A new vGPU. Errors: ``exists`` (name), ``no-room`` with the largest that would fit."""
        if vgpu_id in self._records:
            raise VgpuError(ErrorCode.EXISTS, f"{vgpu_id} exists already")
        key = self._free_key()
        expires = None if spec.ttl_ns is None else now_unix_ns + spec.ttl_ns
        record = self._meaning(vgpu_id, key, spec, owner, now_unix_ns, expires, self.mode)
        self._commit(self._records | {vgpu_id: record}, record)
        return record

    def change(self, vgpu_id: str, changes: VgpuChanges, now_unix_ns: int) -> VgpuRecord:
        """``vgpuctl set``. A new ttl counts from now. Errors as ``create``, and ``invalid``."""
        old = self._records[vgpu_id]
        spec = changes.applied_to(old.spec)
        expires = old.expires_unix_ns if changes.ttl_ns is None else now_unix_ns + changes.ttl_ns
        record = self._meaning(vgpu_id, old.key, spec, old.owner, old.created_unix_ns, expires, self.mode)
        self._commit(self._records | {vgpu_id: record}, record)
        return record

    def remove(self, vgpu_id: str) -> VgpuRecord:
        return self._records.pop(vgpu_id)

    def set_mode(self, mode: Mode) -> None:
        """Re-derive every vGPU for ``mode``; ``VgpuError`` (no-room, mode) if they cannot all be kept there."""
        changed = {
            record.vgpu_id: self._meaning(
                record.vgpu_id,
                record.key,
                record.spec,
                record.owner,
                record.created_unix_ns,
                record.expires_unix_ns,
                mode,
            )
            for record in self
        }
        self._refuse_unless_fit(mode, changed)
        self.mode, self._records = mode, changed

    def restore(self, records: Iterable[tuple[str, VgpuKey, VgpuSpec, Owner, int, int | None]]) -> None:
        """What the journal remembers, keys included. It was admitted once, so it is not asked to fit again: a card that
        lost memory to somebody else must not make vGPUs vanish."""
        for vgpu_id, key, spec, owner, created, expires in records:
            self._records[vgpu_id] = self._meaning(vgpu_id, key, spec, owner, created, expires, self.mode)

    def expired(self, now_unix_ns: int) -> list[VgpuRecord]:
        """vGPUs whose time is up."""
        return [r for r in self if r.expires_unix_ns is not None and r.expires_unix_ns <= now_unix_ns]

    def next_expiry_unix_ns(self) -> int | None:
        return min((r.expires_unix_ns for r in self if r.expires_unix_ns is not None), default=None)

    # --- decisions

    def _free_key(self) -> VgpuKey:
        taken = {record.key for record in self}
        key = next((key for key in range(MAX_VGPUS) if key not in taken), None)
        if key is None:
            raise VgpuError(ErrorCode.NO_ROOM, f"this GPU has {MAX_VGPUS} vGPUs, its most", "remove one: vgpuctl rm ID")
        return key

    def _meaning(
        self,
        vgpu_id: str,
        key: VgpuKey,
        spec: VgpuSpec,
        owner: Owner,
        created_unix_ns: int,
        expires_unix_ns: int | None,
        mode: Mode,
    ) -> VgpuRecord:
        if mode is Mode.SPATIAL and self.card.sm_count <= 0:
            raise VgpuError(ErrorCode.MODE, "this driver does not tell how many SMs the GPU has", "use --mode temporal")
        granted = partition(spec.compute_ratio * 100, self.card.sm_count) if mode is Mode.SPATIAL else None
        return VgpuRecord(
            vgpu_id=vgpu_id,
            key=key,
            spec=spec,
            owner=owner,
            created_unix_ns=created_unix_ns,
            expires_unix_ns=expires_unix_ns,
            share=share_of(spec, granted),
            memory_limit_bytes=spec.memory_on(self.card.total_memory_bytes),
            partition=granted,
        )

    def _commit(self, records: dict[str, VgpuRecord], changed: VgpuRecord) -> None:
        name = changed.spec.name
        for other in records.values():
            if name is not None and other.spec.name == name and other.vgpu_id != changed.vgpu_id:
                raise VgpuError(
                    ErrorCode.EXISTS, f"{other.vgpu_id} has the name {name!r} already", "choose another --name"
                )
        self._refuse_unless_memory_fits(records, changed)
        if not changed.spec.overcommit:
            self._refuse_unless_fit(self.mode, records)
        self._records = records

    def _refuse_unless_memory_fits(self, records: dict[str, VgpuRecord], changed: VgpuRecord) -> None:
        others = sum(r.memory_limit_bytes for r in records.values() if r.vgpu_id != changed.vgpu_id)
        free = self.card.total_memory_bytes - others
        if changed.memory_limit_bytes > free:
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"{format_bytes(changed.memory_limit_bytes)} of memory do not fit: {format_bytes(max(0, free))} of "
                f"{format_bytes(self.card.total_memory_bytes)} are not promised to another vGPU",
                f"the largest that fits: --mem {max(0, free) >> 20}M" if free >> 20 else "remove one: vgpuctl rm ID",
            )

    def _refuse_unless_fit(self, mode: Mode, records: dict[str, VgpuRecord]) -> None:
        shares = [record.share for record in records.values() if not record.spec.overcommit]
        reason = self._fits(mode, shares)
        if reason:
            raise VgpuError(ErrorCode.NO_ROOM, reason)

    # --- proof

    def check(self) -> None:
        """Raises ``AssertionError`` where an invariant of this module is broken."""
        keys = [record.key for record in self]
        names = [record.spec.name for record in self if record.spec.name is not None]
        assert len(set(keys)) == len(keys)
        assert all(0 <= key < MAX_VGPUS for key in keys)
        assert len(set(names)) == len(names)
        assert self.guaranteed_memory_bytes <= self.card.total_memory_bytes
        assert all((record.partition is None) == (self.mode is Mode.TEMPORAL) for record in self)
        assert all(record.share == share_of(record.spec, record.partition) for record in self)
        assert not self._fits(self.mode, [record.share for record in self if not record.spec.overcommit])


def refusal(mode: Mode, shares: Sequence[Share]) -> str:
    """Why these guarantees cannot all be kept, or "". In both modes no more than the whole card can be promised."""
    total = sum(share.guarantee_ppm * share.sm_mpercent for share in shares) / (PPM * 1000)
    return f"the guarantees add up to {total:.4g} % of the GPU's compute" if total > 100 else ""


def share_of(spec: VgpuSpec, granted: Partition | None) -> Share:
    """The share that ``spec`` promises. Temporal mode (``granted`` None): time is the product of SM share and quota."""
    compute = Fraction(1) if granted is not None else Fraction(spec.compute_ratio).limit_denominator(PPM)
    request = Fraction(spec.quota_request_ratio).limit_denominator(PPM)
    limit = Fraction(spec.quota_limit_percent / 100).limit_denominator(PPM)
    guarantee_ppm = max(1, int(compute * request * PPM))
    return Share(
        guarantee_ppm=guarantee_ppm,
        limit_ppm=PPM if spec.burst else max(guarantee_ppm, int(compute * limit * PPM)),
        sm_mpercent=100_000 if granted is None else granted.mpercent,
        priority=Priority[spec.priority.name],
    )
