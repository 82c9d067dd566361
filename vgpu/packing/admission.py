"""Whether one more vGPU fits a GPU: compute by what can really be packed, memory by its sum.

Temporal mode: guarantees are parts of one GPU's time, so they fit iff Σ r ≤ 1.

Spatial mode: Σ s·r ≤ 100 is necessary, not sufficient. Example: three vGPUs with half of the time and just over half
of the SMs cover three quarters of the GPU, and need one and a half seconds of each second. What decides is φ, the
least total time of a fractional packing:

    φ = min Σ x_S   over sets S with Σ s ≤ 100   such that each vGPU i is in sets of total time ≥ r_i

vGPUs that fit the SMs all at once need no packing. All others fit iff φ ≤ ``PACKING_LIMIT``. Reason for a limit below
1: a lease that drains late takes time from the next round. ``fractional`` finds packings with bounded work. A change is
refused if no packing within the limit was found. The refusal says whether none exists, or the work did not suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vgpu.packing.fractional import PACKING_LIMIT, TOLERANCE, Packing, find, room_for, within_limit, wrapped
from vgpu.packing.knapsack import Work
from vgpu.share import CARD_MPERCENT, PPM, Mode, Share

_LEAST_MPERCENT = 1000  # the least SM share that a specification can ask for


@dataclass(frozen=True, slots=True)
class Demand:
    """What one vGPU asks of a GPU."""

    share: Share
    memory_bytes: int = 0
    """Its guaranteed memory."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a vGPU does not fit, and the largest one that would. None: the vGPU was not refused for that quantity."""

    reason: str
    """One line for the user, without the option names of any program."""
    largest_guarantee_ppm: int | None = None
    """Its time; spatial mode: with the SMs that were asked for. 0: no time is left."""
    largest_sm_mpercent: int | None = None
    """Spatial mode: its SMs for all of the time. 0: no SMs are left."""
    largest_memory_bytes: int | None = None


def packing_of(shares: Sequence[Share], work: Work | None = None, kept: Sequence[Packing] = ()) -> Packing:
    """The shortest packing in spatial mode that ``work`` allows to find. Members of its sets are indices of ``shares``.

    ``kept``: packings of the same vGPUs that were found before, with the same indices.
    """
    return find([s.sm_mpercent for s in shares], [s.guarantee_ppm / PPM for s in shares], work, kept)


def packing_ratio(mode: Mode, shares: Sequence[Share]) -> float:
    """How full the GPU's time is: Σ r in temporal mode, φ in spatial mode."""
    if mode is Mode.TEMPORAL:
        return sum(s.guarantee_ppm for s in shares) / PPM
    return packing_of(shares).time


def fits(mode: Mode, shares: Sequence[Share], work: Work | None = None) -> bool:
    """Whether all guarantees can be kept. With ``work``, False also means that the work did not suffice to decide."""
    if mode is Mode.TEMPORAL:
        return sum(s.guarantee_ppm for s in shares) <= PPM
    return packed(shares, work) is not None


def packed(shares: Sequence[Share], work: Work | None = None, kept: Sequence[Packing] = ()) -> Packing | None:
    """A packing that keeps all guarantees in spatial mode, as proof that they fit; None: none was found.

    The caller keeps it, because a second search may find no such packing with the work that is left.
    """
    if sum(s.sm_mpercent for s in shares) <= CARD_MPERCENT:
        return packing_of(shares, work, kept)
    return within_limit([s.sm_mpercent for s in shares], [s.guarantee_ppm / PPM for s in shares], work, kept)


def admit(
    mode: Mode,
    card_bytes: int,
    present: Sequence[Demand],
    new: Demand,
    *,
    overcommit: bool = False,
    swap: bool = False,
    work: Work | None = None,
    kept: Sequence[Packing] = (),
    packing: Packing | None = None,
) -> Refusal | None:
    """None if ``new`` fits beside ``present``; else why it does not fit, and the largest vGPU that would.

    ``overcommit``: compute guarantees are weights, so any sum fits. ``swap``: the memory of ``new`` is swapped, so it
    has to fit the card alone. ``work``: the bound of the search in spatial mode. ``kept``: packings that were found
    before, by indices of ``present``; ``new`` comes last. ``packing``: the result of ``packing_of`` for all of them.
    """
    room = _memory_refusal(card_bytes, present, new, swap=swap)
    shares = [d.share for d in present]
    time = None if overcommit else _compute_refusal(mode, shares, new.share, work, kept, packing)
    if room is None or time is None:
        return room or time
    return replace(time, reason=f"{room.reason}; {time.reason}", largest_memory_bytes=room.largest_memory_bytes)


def _memory_refusal(card_bytes: int, present: Sequence[Demand], new: Demand, *, swap: bool) -> Refusal | None:
    free_bytes = max(0, card_bytes - sum(d.memory_bytes for d in present))
    largest = card_bytes if swap else free_bytes
    if new.memory_bytes <= largest:
        return None
    left = f"the card has {_gib(card_bytes)}" if swap else f"{_gib(free_bytes)} of {_gib(card_bytes)} are left"
    return Refusal(f"{_gib(new.memory_bytes)} of memory asked for, {left}", largest_memory_bytes=largest)


def _compute_refusal(
    mode: Mode,
    present: Sequence[Share],
    new: Share,
    work: Work | None,
    kept: Sequence[Packing],
    packing: Packing | None,
) -> Refusal | None:
    if mode is Mode.TEMPORAL:
        if fits(mode, [*present, new]):
            return None
        largest = max(0, PPM - sum(s.guarantee_ppm for s in present))
        return Refusal(
            f"{_percent(new.guarantee_ppm, PPM)} of the GPU's time asked for, {_percent(largest, PPM)} is left",
            largest_guarantee_ppm=largest,
        )
    everybody = [*present, new]
    packing = packing_of(everybody, work, kept) if packing is None else packing
    if sum(s.sm_mpercent for s in everybody) <= CARD_MPERCENT or packing.time <= PACKING_LIMIT + TOLERANCE:
        return None
    guarantee = largest_guarantee(present, new, work, kept)
    width = max(0, CARD_MPERCENT - sum(s.sm_mpercent for s in present))
    offers = []
    if guarantee:
        asked = _percent(new.sm_mpercent, CARD_MPERCENT)
        offers.append(f"{asked} of the SMs for {_percent(guarantee, PPM)} of the time")
    if width >= _LEAST_MPERCENT:
        offers.append(f"{_percent(width, CARD_MPERCENT)} of the SMs all the time")
    reason = _why(everybody, packing)
    reason += "; beside the others there is room for " + (", or ".join(offers) or "nothing")
    if not guarantee and packing.least:
        equal = packing_of([replace(s, guarantee_ppm=PPM) for s in everybody], work)
        if equal.least:
            reason += f"; with the same quota for all of them, {int(100 * PACKING_LIMIT / equal.time)}% each would fit"
    return Refusal(reason, largest_guarantee_ppm=guarantee, largest_sm_mpercent=width)


def _why(shares: Sequence[Share], packing: Packing) -> str:
    """Why ``packing`` does not admit ``shares``: the least packing is too long, or no shorter one was found."""
    area = sum(s.guarantee_ppm * s.sm_mpercent for s in shares) / (PPM * CARD_MPERCENT)
    if packing.least:
        return f"the guarantees together need {packing.time:.2f} s of every second"
    if area > PACKING_LIMIT:
        return f"the guarantees together need at least {area:.2f} s of every second"
    return (
        f"no packing of these {len(shares)} vGPUs of unlike sizes was found with the work that one change may cost; "
        f"fewer sizes and quotas are packed more easily"
    )


def largest_guarantee(
    present: Sequence[Share], new: Share, work: Work | None = None, kept: Sequence[Packing] = ()
) -> int:
    """The greatest guarantee (ppm, whole tenths of a percent) at which ``new`` fits beside ``present`` in spatial mode.
    If ``work`` does not suffice for it, a smaller guarantee that fits.

    φ is convex in the guarantee, and the prices of a packing give a line below φ. That line crosses the limit at a
    guarantee that is never too small. Packing again from there converges from above (Kelley's cutting planes).
    """
    widths = [*(s.sm_mpercent for s in present), new.sm_mpercent]
    if sum(widths) <= CARD_MPERCENT:
        return PPM
    others = [s.guarantee_ppm / PPM for s in present]
    asked = 1.0
    while asked > 0:
        packing = find(widths, [*others, asked], work, kept)
        if packing.time <= PACKING_LIMIT + TOLERANCE:
            break
        if not packing.prices:
            return _sure_guarantee(widths, others, kept)
        price = packing.prices[-1]
        rest = sum(p * r for p, r in zip(packing.prices, others, strict=False))
        asked = min((PACKING_LIMIT - rest) / price, asked - 1e-4) if price > TOLERANCE else 0.0
    return _tenths(asked)


def _sure_guarantee(widths: Sequence[int], others: Sequence[float], kept: Sequence[Packing]) -> int:
    """A guarantee at which the last of ``widths`` is admitted. It may not be the greatest, and takes little work."""
    asked = max((room_for(widths[-1], one.without(len(others)), widths) for one in kept), default=0.0)
    low, high = 0, 1000
    while high - low > 1:
        middle = (low + high) // 2
        found = wrapped(widths, [*others, middle / 1000])
        low, high = (middle, high) if found.time <= PACKING_LIMIT else (low, middle)
    return max(_tenths(asked), low * 1000)


def _tenths(asked: float) -> int:
    return int(max(asked, 0.0) * 1000 + 1e-4) * 1000


def overcommitted(mode: Mode, shares: Sequence[Share]) -> list[Share]:
    """``shares`` with their guarantees as weights: if they do not fit, one factor scales them down until they do."""
    if fits(mode, shares):
        return list(shares)
    ratio = packing_ratio(mode, shares) / (1.0 if mode is Mode.TEMPORAL else PACKING_LIMIT)
    return [replace(s, guarantee_ppm=max(1, int(s.guarantee_ppm / ratio))) for s in shares]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g}%"


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"
