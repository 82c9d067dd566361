"""Rows of usage: sums of one vGPU over one bucket of time. The older a row, the longer its bucket (``TIERS``). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from vgpu.bounds import MOST_STORED

OTHERS: Final = "others"
"""Stands for the vGPUs of a user that have no row of their own in a bucket. No vGPU has this id."""
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Tier:
    """Buckets of ``span_s``, kept for ``keep_s``. Each has at most ``most_vgpus`` vGPUs of one user, and one row for
    the user's other ones."""

    span_s: int
    keep_s: int
    most_vgpus: int


TIERS: Final = (Tier(MINUTE_S, DAY_S, 16), Tier(HOUR_S, 35 * DAY_S, 16), Tier(DAY_S, 730 * DAY_S, 8))
TIER_OF: Final = {tier.span_s: tier for tier in TIERS}
MOST_ROWS: Final = 200_000
"""Of all users. Beyond that, the oldest buckets are merged or dropped before their time."""
MOST_OF_A_USER: Final = sum(tier.keep_s // tier.span_s * (tier.most_vgpus + 1) for tier in TIERS)


@dataclass(frozen=True, slots=True)
class Sums:
    """``measured_ns``: how long the vGPU existed while a node measured it. ``promised_ns``, ``used_ns``: time of a
    whole GPU. ``wasted_ns``: promised and not used, from one reading to the next. ``limited_ns``: at its limit.
    ``waiting_ns``: it wanted the GPU, and had less than was promised. ``attached_ns``: with a program in it. Memory is
    in KiB · seconds. ``refusals``: of memory. ``swaps``: moves of its memory back to the card."""

    measured_ns: int = 0
    promised_ns: int = 0
    used_ns: int = 0
    wasted_ns: int = 0
    limited_ns: int = 0
    waiting_ns: int = 0
    attached_ns: int = 0
    memory_promised_kib_s: int = 0
    memory_used_kib_s: int = 0
    refusals: int = 0
    swaps: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        """In the order of the fields."""
        found: tuple[int, ...] = _VALUES(self)
        return found

    def __add__(self, other: Sums) -> Sums:
        return Sums(*[min(MOST_STORED, one + two) for one, two in zip(_VALUES(self), _VALUES(other), strict=True)])

    def split(self, weights: Iterable[int]) -> list[Sums]:
        """Parts in these proportions; together they are exactly the whole."""
        weights = list(weights)
        if len(weights) == 1:
            return [self]
        values, parts = self.values, []
        given = tuple(0 for _ in values)
        whole, so_far = sum(weights), 0
        for weight in weights:
            so_far += weight
            reached = tuple(value * so_far // whole for value in values)
            parts.append(Sums(*(now - before for now, before in zip(reached, given, strict=True))))
            given = reached
        return parts


_VALUES: Final = attrgetter(*(field.name for field in fields(Sums)))


class Key(NamedTuple):
    span_s: int
    start_unix_s: int
    owner_uid: int
    vgpu_id: str


Rows: TypeAlias = dict[Key, Sums]


def add(rows: Rows, more: Mapping[Key, Sums]) -> None:
    for key, sums in more.items():
        rows[key] = rows[key] + sums if key in rows else sums


def coarser(rows: Mapping[Key, Sums], span_s: int) -> Rows:
    """The same in buckets of ``span_s``, each of which holds whole buckets of ``rows``."""
    found: Rows = {}
    for key, sums in rows.items():
        start = key.start_unix_s // span_s * span_s
        add(found, {key._replace(span_s=span_s, start_unix_s=start): sums})
    return found


def capped(rows: Mapping[Key, Sums]) -> Rows:
    """At most ``most_vgpus`` vGPUs of one user in each bucket: the smallest ones merge into ``OTHERS``."""
    buckets: dict[tuple[int, int, int], list[Key]] = {}
    for key in rows:
        buckets.setdefault((key.span_s, key.start_unix_s, key.owner_uid), []).append(key)
    found: Rows = {}
    for (span_s, _, _), keys in buckets.items():
        keys.sort(key=lambda key: (key.vgpu_id != OTHERS, *_size(rows[key]), key.vgpu_id), reverse=True)
        own = [key for key in keys if key.vgpu_id != OTHERS][: TIER_OF[span_s].most_vgpus]
        for key in keys:
            add(found, {key if key in own else key._replace(vgpu_id=OTHERS): rows[key]})
    return found


def _size(sums: Sums) -> tuple[int, int, int]:
    return sums.promised_ns + sums.used_ns, sums.memory_promised_kib_s, sums.measured_ns
