"""The user of a link, and whether that user may have one more. Pure, but for ``read_owners``.

A user may have subordinate uids (/etc/subuid), 65,536 as a rule, and take any of them in a user namespace. So they
count as their owner. The node reads the files without the name service, which may be slow. An owner that is in no local
file counts under the name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from vgpu.errors import ErrorCode, VgpuError
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.units import counted

Source: TypeAlias = int | str
"""A uid; or the name of an owner without a known uid."""
SUBUID: Final = Path("/etc/subuid")
PASSWD: Final = Path("/etc/passwd")


@dataclass(frozen=True, slots=True)
class Owners:
    """Ranges of subordinate uids, by their first; of those that overlap, the one that begins last."""

    firsts: tuple[int, ...] = ()
    ranges: tuple[tuple[int, Source], ...] = ()
    """(how many, their owner), in the order of ``firsts``."""

    def source_of(self, uid: int) -> Source:
        at = bisect_right(self.firsts, uid) - 1
        if at >= 0:
            many, owner = self.ranges[at]
            if uid < self.firsts[at] + many:
                return owner
        return uid


def owners(subuid: str, passwd: str) -> Owners:
    """From the texts of /etc/subuid and /etc/passwd. Lines that are none are skipped."""
    uids = {name: int(uid) for name, uid, *_ in _fields(passwd, (0, 2)) if uid.isdecimal()}
    found: dict[int, tuple[int, Source]] = {}
    for owner, first, many in _fields(subuid, (0, 1, 2)):
        if first.isdecimal() and many.isdecimal():
            found[int(first)] = int(many), int(owner) if owner.isdecimal() else uids.get(owner, owner)
    firsts = tuple(sorted(found))
    return Owners(firsts, tuple(found[first] for first in firsts))


def _fields(text: str, wanted: tuple[int, ...]) -> Iterable[tuple[str, ...]]:
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) > max(wanted):
            yield tuple(fields[index] for index in wanted)


def read_owners() -> Owners:
    texts = []
    for path in (SUBUID, PASSWD):
        text = ""
        with suppress(OSError):
            text = path.read_text(errors="replace")
        texts.append(text)
    return owners(*texts)


@dataclass(slots=True)
class Places:
    """The places for links: ``enter`` before one is served, ``leave`` after. ``exempt``: uids without a bound per user,
    for which ``links_kept`` places are kept."""

    limits: Limits = DEFAULT_LIMITS
    exempt: frozenset[int] = frozenset({0})
    owners: Owners = field(default_factory=Owners)
    _links: Counter[Source] = field(default_factory=Counter)
    _others: int = 0

    def enter(self, uid: int) -> Source | None:
        """Take a place for one more link of ``uid``. Returns the source that it counts for, which ``leave`` needs;
        None: it takes no place. ``VgpuError`` (unavailable): there is no place for it."""
        if uid in self.exempt:
            return None
        source = self.owners.source_of(uid)
        if self._links[source] >= self.limits.links_per_user:
            raise _full(f"{_named(uid, source)} has {counted(self.limits.links_per_user, 'link')} to this node already")
        if self._others >= self.limits.links - self.limits.links_kept:
            raise _full(f"this node has {counted(self._others, 'link')} already, its most for users")
        self._links[source] += 1
        self._others += 1
        return source

    def leave(self, place: Source | None) -> None:
        if place is None:
            return
        self._others -= 1
        self._links[place] -= 1
        if not self._links[place]:
            del self._links[place]


def _full(reason: str) -> VgpuError:
    return VgpuError(ErrorCode.UNAVAILABLE, reason, "end some programs that watch or ask")


def _named(uid: int, source: Source) -> str:
    return f"uid {uid}" if source == uid else f"the owner of uid {uid} ({source})"
