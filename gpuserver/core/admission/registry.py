"""The vGPUs of one GPU: what exists, what it was promised, and what else would fit. Sans I/O.

Theory of operation
-------------------
Every change is decided on a copy and committed whole: a request that is refused (``VgpuError``) has changed nothing.
A record holds what a person asked for (``spec``) and what it means on this card and in this mode (``share``,
``memory_limit_bytes``, ``partition``). Changing the mode of the GPU re-derives the meaning of every record.

In spatial mode the registry keeps the packing for which a change was admitted: no reading packs anew, and the work of
a change is bounded. A removal is never refused: the packing that there is serves those that stay.

Invariants (``check``): keys, and the names of each owner, are unique; keys lie within the relay page; Σ guaranteed
memory ≤ the card; every record means what its specification says; and without overcommitment the guarantees can all be
kept at once. The kept packing serves every vGPU that is there. Without its overcommitted vGPUs, a change keeps it
within the limit on which the change was admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Final

from gpuserver.core.scheduler.leases import VgpuIndex
from vgpu.enums import LeaseChoice, Oversubscribe
from vgpu.errors import ErrorCode, VgpuError
from vgpu.packing.admission import Demand, Refusal, admit, fits, packed, packing_of, packing_ratio
from vgpu.packing.fractional import NO_PACKING, STEPS, Packing
from vgpu.packing.knapsack import Work
from vgpu.packing.partition import Partition, partition
from vgpu.share import CARD_MPERCENT, PPM, Mode, Priority, Share
from vgpu.spec import SMALLEST_MEMORY_BYTES, VgpuChanges, VgpuSpec, refuse_like_id
from vgpu.units import MIB, counted, format_bytes, parse_slo

MAX_VGPUS = 256
NOTHING = Share(guarantee_ppm=0, sm_mpercent=0)
"""What an overcommitted vGPU takes from those that were promised something."""


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """The physical GPU as the registry sees it. ``sm_count`` 0: unknown, then spatial mode is refused."""

    total_memory_bytes: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The user that made a vGPU. ``share_gid``: a group that may attach too, −1: none."""

    uid: int
    share_gid: int = -1


@dataclass(frozen=True, slots=True)
class VgpuRecord:
    """One vGPU. ``expires_unix_ns`` None: never."""

    vgpu_id: str
    key: VgpuIndex
    spec: VgpuSpec
    owner: Owner
    created_unix_ns: int
    expires_unix_ns: int | None
    share: Share
    promised_memory_bytes: int
    memory_limit_bytes: int
    partition: Partition | None  # spatial mode only
    suspended: bool = False
    """It has nothing on the GPU, and is promised nothing until it is resumed."""

    @property
    def guaranteed_memory_bytes(self) -> int:
        """What the card keeps for it."""
        return 0 if self.suspended or self.spec.oversubscribe else self.promised_memory_bytes

    @property
    def demand(self) -> Demand:
        """What others have to leave to it."""
        soft = self.suspended or self.spec.overcommit
        return Demand(NOTHING if soft else self.share, self.guaranteed_memory_bytes)

    @property
    def swaps(self) -> bool:
        """Its plain memory can leave the card, and is on it whole while it runs."""
        return self.spec.oversubscribe is Oversubscribe.SWAP

    @property
    def borrows(self) -> bool:
        """It may have memory on the card that it was not promised."""
        return self.spec.oversubscribe is not None or self.memory_limit_bytes > self.promised_memory_bytes

    @property
    def process_limit_bytes(self) -> int:
        """The most that one process of it may own; 0: as much as the vGPU."""
        return self.spec.process_memory_bytes or 0

    @property
    def most_per_process_bytes(self) -> int:
        return min(self.memory_limit_bytes, self.process_limit_bytes or self.memory_limit_bytes)


@dataclass(frozen=True, slots=True)
class PerUser:
    """How many vGPUs one user may have on this GPU. ``kept``: keys for the ``exempt`` users, which have no bound."""

    most: int = MAX_VGPUS
    kept: int = 0
    exempt: frozenset[int] = frozenset({0})


_TEMPORAL_ONLY: Final[tuple[tuple[str, str, Callable[[VgpuSpec], bool]], ...]] = (
    (
        "belong to groups, which hold together in temporal mode only",
        "remove them first: vgpuctl rm ID",
        lambda spec: spec.group is not None,
    ),
    (
        "may own more memory than the card has, which takes temporal mode",
        "remove them first: vgpuctl rm ID",
        lambda spec: spec.oversubscribe is not None,
    ),
    (
        "are to be suspended when they are idle, which MPS does not allow",
        "give that up first: vgpuctl set ID --idle-suspend off",
        lambda spec: bool(spec.idle_suspend_ns),
    ),
    (
        "have two bounds of --sm, and a process under MPS keeps its SMs for life",
        "give each one value first: vgpuctl set ID --sm 30",
        lambda spec: spec.sm_range_percent is not None,
    ),
)
"""Why vGPUs keep a GPU in temporal mode, what to type, and which vGPUs."""


class Registry:
    """All vGPUs of one GPU."""

    def __init__(self, card: GpuCapacity, mode: Mode, per_user: PerUser = PerUser()) -> None:
        self.card = card
        self.per_user = per_user
        self.mode = mode
        self.occupied_bytes = 0
        """What vGPUs have on the card beyond what they were promised. No other vGPU can be promised that."""
        self.draining = False
        """The GPU takes no new vGPUs, and none of another GPU."""
        self._records: dict[str, VgpuRecord] = {}
        self._packing = NO_PACKING
        """Of spatial mode, by key: of the guarantees as they were when the last change was made."""

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
        return sum(record.guaranteed_memory_bytes for record in self)

    @property
    def guaranteed_ratio(self) -> float:
        """How much of the card's compute is promised. 1: nothing more can be."""
        shares = [record.share for record in self if not record.suspended]
        area = sum(s.guarantee_ppm * s.sm_mpercent for s in shares) / (PPM * CARD_MPERCENT)
        if sum(s.sm_mpercent for s in shares) <= CARD_MPERCENT or self.mode is Mode.TEMPORAL:
            return area
        return max(area, self._packing.time)

    @property
    def packing(self) -> Packing:
        """The packing that was kept, by the keys of the vGPUs; without sets in temporal mode."""
        return self._packing

    def copy(self) -> Registry:
        """To try a change on."""
        return copy(self)

    # --- changes

    def create(self, vgpu_id: str, spec: VgpuSpec, owner: Owner, now_unix_ns: int) -> VgpuRecord:
        """A new vGPU. Errors: ``exists`` (name), ``no-room`` with the largest that would fit, or for a second one of a
        group; ``mode`` for one of a group, or with memory that need not fit, where vGPUs do not take turns."""
        if vgpu_id in self._records:
            raise VgpuError(ErrorCode.EXISTS, f"{vgpu_id} exists already")
        self._check_draining()
        refuse_like_id(spec.name)
        if spec.group is not None:
            self._check_group(spec.group, owner)
        if spec.oversubscribe is not None and self.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                "this GPU is in spatial mode, and memory is oversubscribed where vGPUs take turns on the whole GPU",
                "leave out --oversubscribe, or: vgpuctl gpu set GPU --mode temporal",
            )
        self._check_idle_suspend(spec.idle_suspend_ns)
        self._check_range(spec)
        expires = None if spec.ttl_ns is None else now_unix_ns + spec.ttl_ns
        return self._admit(vgpu_id, spec, owner, now_unix_ns, expires)

    def adopt(
        self,
        vgpu_id: str,
        spec: VgpuSpec,
        owner: Owner,
        created_unix_ns: int,
        expires_unix_ns: int | None,
        *,
        suspended: bool,
        owned_bytes: int = 0,
        again: str,
    ) -> VgpuRecord:
        """One that comes from another GPU. Errors as ``create``, and ``mode`` where vGPUs do not take turns.
        ``owned_bytes``: what it comes with, however little it is promised; ``again``: what to type once it is smaller.
        """
        self._check_draining()
        if self.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                "that GPU is in spatial mode, and vGPUs move between GPUs in temporal mode",
                "choose another GPU, or: vgpuctl gpu set GPU --mode temporal",
            )
        if spec.group is not None:
            self._check_group(spec.group, owner)
        typed = f"vgpuctl set {vgpu_id} {{}}, then {again}"
        return self._admit(
            vgpu_id,
            spec,
            owner,
            created_unix_ns,
            expires_unix_ns,
            suspended=suspended,
            typed=typed,
            owned_bytes=owned_bytes,
        )

    def _admit(
        self,
        vgpu_id: str,
        spec: VgpuSpec,
        owner: Owner,
        created_unix_ns: int,
        expires_unix_ns: int | None,
        *,
        suspended: bool = False,
        typed: str = "{}",
        owned_bytes: int = 0,
    ) -> VgpuRecord:
        record = self._meaning(vgpu_id, self._free_key(owner), spec, owner, created_unix_ns, expires_unix_ns, self.mode)
        record = replace(record, suspended=suspended)
        self._commit(self._records | {vgpu_id: record}, record, typed=typed, owned_bytes=owned_bytes)
        return record

    def change(self, vgpu_id: str, changes: VgpuChanges, now_unix_ns: int) -> VgpuRecord:
        """``vgpuctl set``. A new ttl counts from now. Errors as ``create``, and ``invalid``."""
        old = self._records[vgpu_id]
        refuse_like_id(changes.name)
        self._check_idle_suspend(changes.idle_suspend_ns)
        spec = changes.applied_to(old.spec)
        self._check_range(spec)
        expires = old.expires_unix_ns if changes.ttl_ns is None else now_unix_ns + changes.ttl_ns
        record = self._meaning(vgpu_id, old.key, spec, old.owner, old.created_unix_ns, expires, self.mode)
        record = replace(record, suspended=old.suspended)
        self._commit(self._records | {vgpu_id: record}, record)
        return record

    def suspend(self, vgpu_id: str) -> VgpuRecord:
        """Others may have what it was promised."""
        record = replace(self._records[vgpu_id], suspended=True)
        self._settle(self._records | {vgpu_id: record}, Work(STEPS))
        return record

    def resume(self, vgpu_id: str, owned_bytes: int = 0) -> VgpuRecord:
        """It is promised what it was. ``no-room``, and no change, where others have been promised that meanwhile.
        ``owned_bytes``: what it comes with, however little it is promised."""
        record = replace(self._records[vgpu_id], suspended=False)
        typed = f"vgpuctl set {vgpu_id} {{}}, then vgpuctl resume {vgpu_id}"
        self._commit(self._records | {vgpu_id: record}, record, typed=typed, owned_bytes=owned_bytes)
        return self._records[vgpu_id]

    def remove(self, vgpu_id: str) -> VgpuRecord:
        """Never refused, and never more work than a change: those that stay have a packing already."""
        removed = self._records[vgpu_id]
        before, kept = self._records, self._packing.without(removed.key)
        self._packing = kept
        self._settle({i: r for i, r in before.items() if i != vgpu_id}, Work(STEPS))
        if any(r.share.guarantee_ppm < before[i].share.guarantee_ppm for i, r in self._records.items()):
            # The work did not suffice to find out that the overcommitted can have what they had.
            self._records, self._packing = {i: before[i] for i in self._records}, kept
        return removed

    def set_mode(self, mode: Mode) -> None:
        """Re-derive every vGPU for ``mode``; ``VgpuError`` (no-room, mode), and no change, if they cannot all be kept
        there."""
        self._records, self._packing = self._in_mode(mode)
        self.mode = mode

    def in_mode(self, mode: Mode) -> dict[str, VgpuRecord]:
        """What ``set_mode`` would make of every vGPU, or refuse."""
        return self._in_mode(mode)[0]

    def _in_mode(self, mode: Mode) -> tuple[dict[str, VgpuRecord], Packing]:
        for why, hint, is_so in _TEMPORAL_ONLY if mode is Mode.SPATIAL else ():
            if ids := [record.vgpu_id for record in self if is_so(record.spec)]:
                raise VgpuError(ErrorCode.MODE, f"{', '.join(ids)} {why}", hint)
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
        changed = {i: replace(record, suspended=self._records[i].suspended) for i, record in changed.items()}
        hard = [r.share for r in changed.values() if not r.spec.overcommit and not r.suspended]
        work = Work(STEPS)
        proof = packed(hard, work) if mode is Mode.SPATIAL else NO_PACKING
        if proof is None or (mode is Mode.TEMPORAL and not fits(mode, hard)):
            found = packing_of(hard, Work(STEPS)) if mode is Mode.SPATIAL else None
            if found is None or found.least:
                ratio = packing_ratio(mode, hard) if found is None else found.time
                needed = f"the guarantees of these vGPUs need {ratio:.2f} s of every second"
            else:
                needed = f"no packing of these {len(hard)} vGPUs was found with the work that one change may cost"
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"in {mode.value} mode {needed}",
                "make room first: vgpuctl set ID, or vgpuctl rm ID",
            )
        keys = [r.key for r in changed.values() if not r.spec.overcommit and not r.suspended]
        return settled(mode, changed, work, [proof.renamed(dict(enumerate(keys)))])

    def restore(self, records: Iterable[tuple[str, VgpuIndex, VgpuSpec, Owner, int, int | None, bool]]) -> None:
        """Take in the journal's vGPUs, keys included. They were admitted once, so they need not fit again. Reason: a
        card that lost memory to another program must not make vGPUs vanish."""
        for vgpu_id, key, spec, owner, created, expires, suspended in records:
            record = self._meaning(vgpu_id, key, spec, owner, created, expires, self.mode)
            self._records[vgpu_id] = replace(record, suspended=suspended)
        self._settle(self._records, Work(STEPS))

    def _settle(self, records: dict[str, VgpuRecord], work: Work, proof: Packing = NO_PACKING) -> None:
        """``proof``: the packing for which a change was admitted, by key."""
        self._records, self._packing = settled(
            self.mode, records, work, [one for one in (self._packing, proof) if one.sets]
        )

    def expired(self, now_unix_ns: int) -> list[VgpuRecord]:
        """vGPUs whose time is up."""
        return [r for r in self if r.expires_unix_ns is not None and r.expires_unix_ns <= now_unix_ns]

    # --- decisions

    def _check_group(self, group: str, owner: Owner) -> None:
        if self.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                f"this GPU is in spatial mode, and only leases of temporal mode are given to group {group!r} together",
                "leave out --group, or: vgpuctl gpu set GPU --mode temporal",
            )
        member = next((r for r in self if r.spec.group == group and r.owner.uid == owner.uid), None)
        if member is not None:
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"{member.vgpu_id} of group {group!r} is on this GPU already, and only one of them could hold at once",
                "choose another GPU with --gpu, or another --group",
            )

    def _check_idle_suspend(self, idle_suspend_ns: int | None) -> None:
        if idle_suspend_ns and self.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                "this GPU is in spatial mode, and processes under MPS cannot be suspended, idle or not",
                "leave out --idle-suspend, or: vgpuctl gpu set GPU --mode temporal",
            )

    def _check_range(self, spec: VgpuSpec) -> None:
        if spec.sm_range_percent is not None and self.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                "this GPU is in spatial mode, and a process under MPS keeps its SMs for life: --sm has one value there",
                f"--sm {spec.sm_range_percent[0]:g}, or: vgpuctl gpu set GPU --mode temporal",
            )

    def _free_key(self, owner: Owner) -> VgpuIndex:
        taken = {record.key for record in self}
        key = next((key for key in range(MAX_VGPUS) if key not in taken), None)
        if key is None:
            raise VgpuError(ErrorCode.NO_ROOM, f"this GPU has {MAX_VGPUS} vGPUs, its most", "remove one: vgpuctl rm ID")
        if owner.uid not in self.per_user.exempt:
            self._check_part(owner, MAX_VGPUS - len(taken))
        return key

    def _check_draining(self) -> None:
        if self.draining:
            raise VgpuError(
                ErrorCode.NO_ROOM, "this GPU is drained, and takes no vGPU", "choose another; vgpuctl gpu undrain GPU"
            )

    def _check_part(self, owner: Owner, free: int) -> None:
        """Raise ``VgpuError`` if a user with a bound may have no more vGPUs."""
        most, kept = self.per_user.most, self.per_user.kept
        if sum(record.owner.uid == owner.uid for record in self) >= most:
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"uid {owner.uid} has {counted(most, 'vGPU')} on this GPU, a user's most",
                "remove one: vgpuctl rm ID",
            )
        if free <= kept:
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"this GPU has {counted(MAX_VGPUS - free, 'vGPU')}, and keeps the last {kept} for root",
                "remove one: vgpuctl rm ID",
            )

    def _meaning(
        self,
        vgpu_id: str,
        key: VgpuIndex,
        spec: VgpuSpec,
        owner: Owner,
        created_unix_ns: int,
        expires_unix_ns: int | None,
        mode: Mode,
    ) -> VgpuRecord:
        if mode is Mode.SPATIAL and self.card.sm_count <= 0:
            raise VgpuError(ErrorCode.MODE, "this driver does not tell how many SMs the GPU has", "use --mode temporal")
        promised = spec.memory_on(self.card.total_memory_bytes)
        if spec.memory_limit_bytes is not None and spec.memory_limit_bytes < promised:
            limit, least = format_bytes(spec.memory_limit_bytes), format_bytes(promised)
            raise VgpuError(ErrorCode.INVALID, f"--mem-limit {limit} is less than the {least} promised", "give --mem")
        granted = partition(spec.compute_ratio * 100, self.card.sm_count) if mode is Mode.SPATIAL else None
        return VgpuRecord(
            vgpu_id=vgpu_id,
            key=key,
            spec=spec,
            owner=owner,
            created_unix_ns=created_unix_ns,
            expires_unix_ns=expires_unix_ns,
            share=share_of(spec, granted),
            promised_memory_bytes=promised,
            memory_limit_bytes=max(promised, spec.memory_limit_bytes or 0),
            partition=granted,
        )

    def _commit(
        self, records: dict[str, VgpuRecord], changed: VgpuRecord, *, typed: str = "{}", owned_bytes: int = 0
    ) -> None:
        name = changed.spec.name
        for other in records.values():
            same = name is not None and other.spec.name == name and other.owner.uid == changed.owner.uid
            if same and other.vgpu_id != changed.vgpu_id:
                hint = f"choose another --name; vgpuctl rm {name} removes that one"
                raise VgpuError(ErrorCode.EXISTS, f"{other.vgpu_id} has the name {name!r} already", hint)
        others = [record for record in records.values() if record.vgpu_id != changed.vgpu_id]
        work = Work(STEPS)
        places = {record.key: place for place, record in enumerate([*others, None, changed]) if record is not None}
        present = [*(other.demand for other in others), Demand(NOTHING, self.occupied_bytes)]
        new = Demand(
            NOTHING if changed.suspended else changed.share,
            changed.promised_memory_bytes if changed.swaps else changed.guaranteed_memory_bytes,
        )
        kept = self._packing.renamed(places)
        # An overcommitted one is not asked to fit: those that were promised something have their packing already.
        found = kept.without(places[changed.key])
        if self.mode is Mode.SPATIAL and not changed.spec.overcommit:
            found = packing_of([*(other.share for other in present), new.share], work, [kept])
        refusal = admit(
            self.mode,
            self.card.total_memory_bytes,
            present,
            new,
            overcommit=changed.spec.overcommit,
            swap=changed.swaps,
            work=work,
            kept=[kept],
            packing=found,
        )
        if refusal is not None:
            if refusal.largest_memory_bytes is not None and refusal.largest_memory_bytes < owned_bytes:
                refusal = replace(refusal, largest_memory_bytes=0)
            uid = changed.owner.uid
            may_remove = uid == 0 or not others or any(record.owner.uid == uid for record in others)
            raise refusal_error(refusal, changed.spec, self.card.sm_count, typed, may_remove=may_remove)
        self._settle(records, work, found.renamed({place: key for key, place in places.items()}))

    # --- proof

    def check(self) -> None:
        """Raises ``AssertionError`` where an invariant of this module is broken."""
        keys = [record.key for record in self]
        names = [(record.owner.uid, record.spec.name) for record in self if record.spec.name is not None]
        assert len(set(keys)) == len(keys)
        assert all(0 <= key < MAX_VGPUS for key in keys)
        assert len(set(names)) == len(names)
        assert self.guaranteed_memory_bytes <= self.card.total_memory_bytes
        assert all((record.partition is None) == (self.mode is Mode.TEMPORAL) for record in self)
        for record in self:
            asked = share_of(record.spec, record.partition)
            assert record.share == (
                replace(asked, guarantee_ppm=record.share.guarantee_ppm) if record.spec.overcommit else asked
            )
            assert 1 <= record.share.guarantee_ppm <= asked.guarantee_ppm
        if self.mode is Mode.SPATIAL:
            self._check_packing()

    def _check_packing(self) -> None:
        width, guarantee = [0] * MAX_VGPUS, [0.0] * MAX_VGPUS
        for record in self:
            if not record.suspended:
                width[record.key], guarantee[record.key] = record.share.sm_mpercent, record.share.guarantee_ppm / PPM
        assert self._packing.serves(width, guarantee)


def settled(
    mode: Mode, records: dict[str, VgpuRecord], work: Work, kept: Sequence[Packing]
) -> tuple[dict[str, VgpuRecord], Packing]:
    """``records`` with the guarantees of the overcommitted ones scaled down until all can be kept, and the packing that
    keeps them, by key.

    A vGPU without ``--overcommit`` keeps its share, whatever comes later. All overcommitted ones are scaled by the same
    factor, the largest that fits. Where ``work`` does not suffice to find that factor, it is a smaller one. ``kept``:
    packings found before, by key. The packing is not longer than any of them that serves all.
    """
    present = {i: r for i, r in records.items() if not r.suspended}
    soft = {i: share_of(r.spec, r.partition) for i, r in present.items() if r.spec.overcommit}
    keys = [r.key for r in present.values()]
    places = {key: place for place, key in enumerate(keys)}
    before = [one.renamed(places) for one in kept]

    def with_factor(factor_ppm: int) -> list[Share]:
        scaled_down = scaled(soft, factor_ppm)
        return [scaled_down.get(i, r.share) for i, r in present.items()]

    fixed = sum(r.share.guarantee_ppm for i, r in present.items() if i not in soft)
    asked = [share.guarantee_ppm for share in soft.values()]

    def can_be_kept(factor_ppm: int) -> bool:
        if mode is Mode.TEMPORAL:
            return fixed + sum(scaled_ppm(guarantee, factor_ppm) for guarantee in asked) <= PPM
        proof = packed(with_factor(factor_ppm), work, before[:last])
        if proof is not None:
            before[last:] = [proof]
        return proof is not None

    last = len(before)
    low, high = 0, PPM
    if not soft or can_be_kept(PPM):
        low = PPM
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can_be_kept(middle) else (low, middle)
    shares = scaled(soft, low)
    changed = {i: replace(r, share=shares[i]) if i in shares else r for i, r in records.items()}
    if mode is Mode.TEMPORAL:
        return changed, NO_PACKING
    return changed, packing_of(with_factor(low), work, before).renamed(dict(enumerate(keys)))


def scaled(shares: dict[str, Share], factor_ppm: int) -> dict[str, Share]:
    """The shares with every guarantee multiplied by ``factor_ppm`` / 10⁶, and none of it zero."""
    return {i: replace(s, guarantee_ppm=scaled_ppm(s.guarantee_ppm, factor_ppm)) for i, s in shares.items()}


def scaled_ppm(guarantee_ppm: int, factor_ppm: int) -> int:
    return max(1, guarantee_ppm * factor_ppm // PPM)


def refusal_error(
    refusal: Refusal, spec: VgpuSpec, sm_count: int, typed: str = "{}", *, may_remove: bool = True
) -> VgpuError:
    """A refusal in the options that a person typed. Whatever its hint offers is admitted, typed in place of theirs, or
    as ``typed`` says where there were none. ``may_remove``: the person owns one of the vGPUs, or is root."""
    ways: list[list[str]] = []  # for each thing that does not fit, the options of which any one makes it fit
    if refusal.largest_sm_mpercent is not None:
        ways.append(_partition_options(refusal, sm_count))
    elif refusal.largest_guarantee_ppm is not None:
        ways.append(_time_options(refusal.largest_guarantee_ppm, spec))
    if refusal.largest_memory_bytes is not None:
        ways.append(_memory_options(refusal.largest_memory_bytes, spec))
    offers = [typed.format(" ".join(options)) for options in product(*ways)]
    if offers:
        hint = f"the largest that fits: {' or '.join(offers)}"
    else:
        hint = "make room: vgpuctl rm ID" if may_remove else "its room is promised to vGPUs of other users: vgpuctl ls"
    return VgpuError(ErrorCode.NO_ROOM, refusal.reason, hint)


def _time_options(largest_ppm: int, spec: VgpuSpec) -> list[str]:
    """Of temporal mode, where the SM share and the quota are multiplied."""
    tenths = int(largest_ppm * 1000 / (_part(spec.quota_request_ratio) * PPM))
    return [f"--sm {tenths / 10:g}"] if tenths >= 10 else []


def _partition_options(refusal: Refusal, sm_count: int) -> list[str]:
    """Of spatial mode: fewer SMs, of which MPS grants whole steps, or less of the time."""
    width = refusal.largest_sm_mpercent or 0
    tenths = [t for t in range(10, width // 100 + 1) if partition(t / 10, sm_count).mpercent <= width]
    options = [f"--sm {tenths[-1] / 10:g}"] if tenths else []
    quota = (refusal.largest_guarantee_ppm or 0) // 1000
    return options + ([f"--quota-request {quota / 10:g}"] if quota >= 10 else [])


def _memory_options(largest_bytes: int, spec: VgpuSpec) -> list[str]:
    largest_bytes = largest_bytes // MIB * MIB
    if largest_bytes < SMALLEST_MEMORY_BYTES:
        return []
    size = f"{largest_bytes // MIB}M"
    each = max(spec.memory_limit_bytes or 0, largest_bytes) < (spec.process_memory_bytes or 0)
    return [f"--mem {size} --mem-per-process {size}" if each else f"--mem {size}"]


@lru_cache(maxsize=1024)
def _part(ratio: float) -> Fraction:
    return Fraction(ratio).limit_denominator(PPM)


def may_share(spec: VgpuSpec) -> bool:
    """Whether it may hold a shared lease in temporal mode. The members of a group hold at the same time as each other,
    by turns; and vGPUs whose memory need not fit the card have it there one after the other."""
    return spec.lease is LeaseChoice.AUTO and spec.group is None and spec.oversubscribe is None


def share_of(spec: VgpuSpec, granted: Partition | None) -> Share:
    """The share that ``spec`` promises. Temporal mode (``granted`` None): time is the product of SM share and quota."""
    compute = Fraction(1) if granted is not None else _part(spec.compute_ratio)
    request = _part(spec.quota_request_ratio)
    limit = _part(spec.quota_limit_percent / 100)
    guarantee_ppm = max(1, int(compute * request * PPM))
    targets = parse_slo(spec.slo)
    return Share(
        guarantee_ppm=guarantee_ppm,
        limit_ppm=PPM if spec.burst else max(guarantee_ppm, int(compute * limit * PPM)),
        sm_mpercent=CARD_MPERCENT if granted is None else granted.mpercent,
        priority=Priority[spec.priority.name],
        bursts=spec.burst,
        shareable=granted is None and may_share(spec),
        tpot_ns=targets.tpot_ns,
        ttft_ns=targets.ttft_ns,
    )
