"""Fractional packings of a GPU's SMs: φ, the least total time in which each vGPU gets its guarantee.

    φ = min Σ x_S   over sets S with Σ widths ≤ the card   such that each vGPU i is in sets of total time ≥ r_i

Three methods give a packing. Column generation finds the least one; its work grows faster than the cube of the
number of vGPUs. Wrapping vGPUs around lanes, and completing a packing that exists, take little work and give a packing
that may be longer. ``find`` bounds the work, so a change never blocks the server's loop. It returns the best packing
found, and whether that is known to be the least.

Sources: column generation for packing (Gilmore, Gomory 1961), its pricing step being the scheduler's knapsack;
wrap-around (McNaughton 1959).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from vgpu.packing.knapsack import Work, best_set
from vgpu.share import CARD_MPERCENT

PACKING_LIMIT: Final = 0.95
STEPS: Final = 300_000
"""The work of one change. A step is one inner operation of simplex or knapsack; this many take about 50 ms."""
EXACT_MOST: Final = 24
"""With more vGPUs than this, the first packing within the limit is taken, although a shorter one may exist."""
TOLERANCE: Final = 1e-7
_PRICE_UNITS: Final = 10**12
_BISECTIONS: Final = 24
_COMPLETION: Final = 100
"""Steps that wrapping and completing take for each vGPU."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A fractional packing: sets of vGPUs, each of which runs for a part of the time."""

    time: float
    """The sum of the sets' times; φ if ``least``."""
    sets: tuple[tuple[frozenset[int], float], ...]
    """(members, time). Over all sets, each member's time is at least its guarantee."""
    prices: tuple[float, ...] = ()
    """The dual solution, one price per vGPU: Σ price·r = φ, and Σ prices ≤ 1 over every set that fits. Empty: the
    packing is not the least, or came without column generation."""
    least: bool = False
    """It is known that no packing is shorter."""

    def without(self, member: int) -> Packing:
        """The same packing for the other vGPUs, without a new search."""
        sets = tuple((members - {member}, time) for members, time in self.sets)
        kept = tuple((members, time) for members, time in sets if members)
        return Packing(sum(time for _, time in kept), kept)

    def renamed(self, names: Mapping[int, int]) -> Packing:
        """The same packing with each member's new name. A member without a new name is left out."""
        sets = tuple((frozenset(names[i] for i in members if i in names), time) for members, time in self.sets)
        kept = tuple((members, time) for members, time in sets if members)
        return replace(self, sets=kept, time=sum(time for _, time in kept), prices=(), least=False)

    def serves(self, widths: Sequence[int], guarantees: Sequence[float]) -> bool:
        """Whether each vGPU gets its guarantee, and the SMs of each set fit the card."""
        if any(sum(widths[i] for i in members) > CARD_MPERCENT for members, _ in self.sets):
            return False
        given = _given(self.sets, len(widths))
        return all(time >= guarantee - TOLERANCE for time, guarantee in zip(given, guarantees, strict=True))


NO_PACKING: Final = Packing(0.0, ())


def find(
    widths: Sequence[int], guarantees: Sequence[float], work: Work | None = None, kept: Sequence[Packing] = ()
) -> Packing:
    """The least packing, or the shortest that ``work`` allows to find. Without ``work`` the result is always the least.

    ``kept``: packings of the same vGPUs that were found before. A vGPU that is new or has grown may be missing from
    their sets. The result is not longer than a kept packing that serves all vGPUs.
    """
    asked = [i for i, (width, guarantee) in enumerate(zip(widths, guarantees, strict=True)) if width and guarantee > 0]
    if not asked:
        return replace(NO_PACKING, least=True)
    if sum(widths[i] for i in asked) <= CARD_MPERCENT:
        longest = max(guarantees[i] for i in asked)
        return Packing(longest, ((frozenset(asked), longest),), least=True)
    if work is None:
        return _least(widths, guarantees, asked, None)
    found = [wrapped(widths, guarantees), *(completed(one, widths, guarantees) for one in kept)]
    area = sum(widths[i] * guarantees[i] for i in asked) / CARD_MPERCENT
    if len(asked) <= EXACT_MOST or area <= PACKING_LIMIT < min(one.time for one in found):
        found.append(_least(widths, guarantees, asked, work))
    return min(found, key=lambda one: (not one.least, one.time))


def within_limit(
    widths: Sequence[int], guarantees: Sequence[float], work: Work | None = None, kept: Sequence[Packing] = ()
) -> Packing | None:
    """A packing within the limit; None: none was found. It may be longer than that of ``find``, because the methods
    that take little work are tried first."""
    if work is not None and any(guarantees):
        order = _falling(widths, guarantees)
        lanes_fit = max(guarantees) <= PACKING_LIMIT
        if lanes_fit and _lanes_width(widths, guarantees, PACKING_LIMIT, order) <= CARD_MPERCENT:
            return _cut(guarantees, order, PACKING_LIMIT)
        area = sum(width * guarantee for width, guarantee in zip(widths, guarantees, strict=True)) / CARD_MPERCENT
        if area > PACKING_LIMIT + TOLERANCE or not work.spend(_COMPLETION * len(widths)):
            return None
    found = find(widths, guarantees, work, kept)
    return found if found.time <= PACKING_LIMIT + TOLERANCE else None


def _least(widths: Sequence[int], guarantees: Sequence[float], asked: Sequence[int], work: Work | None) -> Packing:
    packing = pack([widths[i] for i in asked], [guarantees[i] for i in asked], work)
    sets = tuple((frozenset(asked[j] for j in members), time) for members, time in packing.sets)
    if not packing.least:
        return replace(packing, sets=sets)
    prices = dict(zip(asked, packing.prices, strict=True))
    return replace(packing, sets=sets, prices=tuple(prices.get(i, 0.0) for i in range(len(widths))))


def pack(widths: Sequence[int], guarantees: Sequence[float], work: Work | None = None) -> Packing:
    """The least packing by column generation. ``widths``: millipercent, each ≤ the card. ``guarantees``: ratios.

    If ``work`` is used up first, the packing is the one of that step, and is not known to be the least.

    Method: revised simplex. In the first basis each vGPU is alone. Each guarantee is perturbed by less than a
    millionth. Reason: without ties, degenerate steps cannot cycle.
    """
    n = len(widths)
    columns = [frozenset([i]) for i in range(n)]
    inverse = [[float(i == j) for j in range(n)] for i in range(n)]
    times = [max(r, 0.0) + TOLERANCE * (i + 1) / (n * n) for i, r in enumerate(guarantees)]
    least = False
    prices: list[float] = []
    while work is None or work.spend(2 * n * n):
        prices = [sum(row[j] for row in inverse) for j in range(n)]
        entering = frozenset(best_set(widths, [int(p * _PRICE_UNITS) for p in prices], CARD_MPERCENT, work))
        if sum(prices[i] for i in entering) <= 1 + TOLERANCE:
            least = work is None or work.left > 0  # else the knapsack may have missed a better set
            break
        direction = [sum(row[j] for j in entering) for row in inverse]
        leaving = min(
            (i for i in range(n) if direction[i] > TOLERANCE), key=lambda i: (times[i] / direction[i], -direction[i])
        )
        step = times[leaving] / direction[leaving]
        pivot = [value / direction[leaving] for value in inverse[leaving]]
        for i in range(n):
            if i == leaving:
                continue
            times[i] = max(0.0, times[i] - step * direction[i])
            inverse[i] = [a - direction[i] * b for a, b in zip(inverse[i], pivot, strict=True)]
        times[leaving], inverse[leaving], columns[leaving] = step, pivot, entering
    sets = tuple(zip(columns, times, strict=True))
    return Packing(sum(times), sets, tuple(prices) if least else (), least)


def wrapped(widths: Sequence[int], guarantees: Sequence[float]) -> Packing:
    """A packing by wrap-around: vGPUs by falling width fill lanes of one length, one lane after the other.

    A vGPU that reaches a lane's end continues at the beginning of the next lane. A lane is as wide as its widest vGPU.
    No vGPU is in two lanes at once, because no guarantee is longer than a lane. The lanes have the least length at
    which they fit the card.
    """
    order = _falling(widths, guarantees)
    low, high = max(guarantees), max(sum(guarantees), TOLERANCE)
    if _lanes_width(widths, guarantees, low, order) <= CARD_MPERCENT:
        high = low
    for _ in range(_BISECTIONS):
        if high - low <= TOLERANCE:
            break
        middle = (low + high) / 2
        fits = _lanes_width(widths, guarantees, middle, order) <= CARD_MPERCENT
        low, high = (low, middle) if fits else (middle, high)
    return _cut(guarantees, order, high)


def _falling(widths: Sequence[int], guarantees: Sequence[float]) -> list[int]:
    return sorted(range(len(widths)), key=lambda i: (-widths[i], -guarantees[i]))


def _lanes_width(
    widths: Sequence[int], guarantees: Sequence[float], length: float, order: Sequence[int] | None = None
) -> int:
    """The total width of all lanes of this length."""
    total, room = 0, 0.0
    for i in _falling(widths, guarantees) if order is None else order:
        left = guarantees[i]
        while left > TOLERANCE:
            if room <= TOLERANCE:
                total, room = total + widths[i], length
            left, room = left - min(left, room), room - min(left, room)
    return total


def _cut(guarantees: Sequence[float], order: Sequence[int], length: float) -> Packing:
    """The lanes of this length as sets. A set ends where a vGPU begins or ends."""
    pieces: list[tuple[float, float, int]] = []
    at = length
    for i in order:
        left = guarantees[i]
        while left > TOLERANCE:
            if length - at <= TOLERANCE:
                at = 0.0
            part = min(left, length - at)
            pieces.append((at, at + part, i))
            at, left = at + part, left - part
    edges = sorted({0.0, length, *(begin for begin, _, _ in pieces), *(end for _, end, _ in pieces)})
    sets = []
    for begin, end in pairwise(edges):
        middle = (begin + end) / 2
        members = frozenset(i for first, last, i in pieces if first < middle < last)
        if members:
            sets.append((members, end - begin))
    return Packing(sum(time for _, time in sets), tuple(sets))


def completed(kept: Packing, widths: Sequence[int], guarantees: Sequence[float]) -> Packing:
    """``kept`` with what it lacks: a vGPU without its full time joins sets that it fits, and gets the rest alone.

    A set that no longer fits, because a member has grown, loses its widest members first.
    """
    sets: list[tuple[frozenset[int], float]] = []
    for members, time in kept.sets:
        narrow = sorted((i for i in members if widths[i] and guarantees[i] > 0), key=lambda i: widths[i])
        while sum(widths[i] for i in narrow) > CARD_MPERCENT:
            narrow.pop()
        sets.append((frozenset(narrow), time))
    given = _given(sets, len(widths))
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        if widths[i] and guarantees[i] - given[i] > TOLERANCE:
            sets = _with(sets, i, guarantees[i] - given[i], widths)
    sets = _trimmed(sets, guarantees)
    return Packing(sum(time for _, time in sets), tuple(sets))


def _given(sets: Sequence[tuple[frozenset[int], float]], count: int) -> list[float]:
    """The time that each vGPU has in ``sets``."""
    given = [0.0] * count
    for members, time in sets:
        for i in members:
            given[i] += time
    return given


def _trimmed(
    sets: Sequence[tuple[frozenset[int], float]], guarantees: Sequence[float]
) -> list[tuple[frozenset[int], float]]:
    """``sets`` without the time that none of their members needs."""
    given = _given(sets, len(guarantees))
    trimmed = []
    for members, time in sets:
        spare = min((given[i] - guarantees[i] for i in members), default=time)
        cut = min(time, max(0.0, spare))
        for i in members:
            given[i] -= cut
        if time > cut:
            trimmed.append((members, time - cut))
    return trimmed


def _with(
    sets: Sequence[tuple[frozenset[int], float]], new: int, missing: float, widths: Sequence[int]
) -> list[tuple[frozenset[int], float]]:
    joined: list[tuple[frozenset[int], float]] = []
    for members, time in sets:
        if missing <= 0 or new in members or sum(widths[i] for i in members) + widths[new] > CARD_MPERCENT:
            joined.append((members, time))
            continue
        part = min(time, missing)
        joined.append((members | {new}, part))
        missing -= part
        if time > part:
            joined.append((members, time - part))
    if missing > 0:
        joined.append((frozenset([new]), missing))
    return joined


def room_for(width: int, kept: Packing, widths: Sequence[int]) -> float:
    """The longest time that one more vGPU of ``width`` gets beside ``kept`` within the limit, without a new search."""
    beside = sum(time for members, time in kept.sets if sum(widths[i] for i in members) + width <= CARD_MPERCENT)
    return max(0.0, min(1.0, beside + max(0.0, PACKING_LIMIT - kept.time)))
