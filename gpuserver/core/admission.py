"""Whether one more vGPU fits a GPU: compute by what can really be packed, memory by its sum.

Temporal mode: guarantees are parts of one GPU's time, so Σ r ≤ 1.

Spatial mode: Σ s·r ≤ 100 is necessary, not sufficient: three vGPUs of 51 % at half time have an area of 76, and need
one and a half seconds a second. What counts is φ, the least total time of a fractional packing,

    φ = min Σ x_S   over sets S with Σ s ≤ 100   such that each vGPU i is in sets of total time ≥ r_i

Where everybody fits at once there is nothing to pack; otherwise φ ≤ 95 % leaves the rounds room for what drains late.

Source: fractional packing by column generation (Gilmore, Gomory 1961), the pricing step being the scheduler's knapsack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuserver.core.knapsack import best_set
from gpuserver.core.leases import Mode, Share
from gpuserver.core.policy import PPM

CARD_MPERCENT = 100_000
PACKING_LIMIT = 0.95
_LEAST_MPERCENT = 1000  # less of the SMs than one percent nobody can ask for
_TOLERANCE = 1e-7
_PRICE_UNITS = 10**12


@dataclass(frozen=True, slots=True)
class Demand:
    """What one vGPU asks of a GPU. ``memory_bytes``: its guaranteed memory."""

    share: Share
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a vGPU does not fit, and what would. ``largest``: ppm of time for "time", millipercent of the SMs for "sms",
    bytes for "memory"; 0: nothing would. ``reason``: one line for the user, without the option names of any program.
    """

    reason: str
    largest_guarantee_ppm: int | None = None
    largest_sm_mpercent: int | None = None
    largest_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """A least fractional packing and the proof that it is one.

    ``time``: φ. ``sets``: (members, time) with Σ time = φ, each member's total time its guarantee. ``prices``: one per
    vGPU, with Σ price·r = φ and Σ prices ≤ 1 over every set that fits (the dual solution).
    """

    time: float
    sets: tuple[tuple[frozenset[int], float], ...]
    prices: tuple[float, ...]


def pack(widths: Sequence[int], guarantees: Sequence[float]) -> Packing:
    """The least total time in which vGPUs of ``widths`` (millipercent, each ≤ the card) get ``guarantees`` (ratio).

    Revised simplex; the first basis is everybody alone. The guarantees are perturbed by less than a millionth, which
    breaks ties, so that degenerate steps cannot cycle.
    """
    n = len(widths)
    columns = [frozenset([i]) for i in range(n)]
    inverse = [[float(i == j) for j in range(n)] for i in range(n)]
    times = [max(r, 0.0) + _TOLERANCE * (i + 1) / (n * n) for i, r in enumerate(guarantees)]
    while True:
        prices = [sum(row[j] for row in inverse) for j in range(n)]
        entering = frozenset(best_set(widths, [int(p * _PRICE_UNITS) for p in prices], CARD_MPERCENT))
        if sum(prices[i] for i in entering) <= 1 + _TOLERANCE:
            break
        direction = [sum(row[j] for j in entering) for row in inverse]
        leaving = min(
            (i for i in range(n) if direction[i] > _TOLERANCE), key=lambda i: (times[i] / direction[i], -direction[i])
        )
        step = times[leaving] / direction[leaving]
        pivot = [value / direction[leaving] for value in inverse[leaving]]
        for i in range(n):
            if i == leaving:
                continue
            times[i] = max(0.0, times[i] - step * direction[i])
            inverse[i] = [a - direction[i] * b for a, b in zip(inverse[i], pivot, strict=True)]
        times[leaving], inverse[leaving], columns[leaving] = step, pivot, entering
    return Packing(sum(times), tuple(zip(columns, times, strict=True)), tuple(prices))


def packing_ratio(mode: Mode, shares: Sequence[Share]) -> float:
    """How full the GPU's time is: Σ r in temporal mode, φ in spatial mode."""
    guarantees = [s.guarantee_ppm / PPM for s in shares]
    if mode is Mode.TEMPORAL:
        return sum(s.guarantee_ppm for s in shares) / PPM
    return pack([s.sm_mpercent for s in shares], guarantees).time


def fits(mode: Mode, shares: Sequence[Share]) -> bool:
    """Whether all guarantees can be kept."""
    if mode is Mode.TEMPORAL:
        return sum(s.guarantee_ppm for s in shares) <= PPM
    if sum(s.sm_mpercent for s in shares) <= CARD_MPERCENT:
        return True
    return packing_ratio(mode, shares) <= PACKING_LIMIT + _TOLERANCE


def admit(
    mode: Mode, card_bytes: int, present: Sequence[Demand], new: Demand, *, overcommit: bool = False, swap: bool = False
) -> Refusal | None:
    """None where ``new`` fits beside ``present``, else all that does not fit, and the largest that would.

    ``overcommit``: compute guarantees are weights, any sum goes. ``swap``: memory takes turns on the card with that of
    others, and has to fit the card alone.
    """
    room = _memory_refusal(card_bytes, present, new, swap=swap)
    time = None if overcommit else _compute_refusal(mode, [d.share for d in present], new.share)
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


def _compute_refusal(mode: Mode, present: Sequence[Share], new: Share) -> Refusal | None:
    if fits(mode, [*present, new]):
        return None
    if mode is Mode.TEMPORAL:
        largest = max(0, PPM - sum(s.guarantee_ppm for s in present))
        return Refusal(
            f"{_percent(new.guarantee_ppm, PPM)} of the GPU's time asked for, {_percent(largest, PPM)} is left",
            largest_guarantee_ppm=largest,
        )
    guarantee = largest_guarantee(present, new)
    width = max(0, CARD_MPERCENT - sum(s.sm_mpercent for s in present))
    ratio = packing_ratio(mode, [*present, new])
    offers = []
    if guarantee:
        asked = _percent(new.sm_mpercent, CARD_MPERCENT)
        offers.append(f"{asked} of the SMs for {_percent(guarantee, PPM)} of the time")
    if width >= _LEAST_MPERCENT:
        offers.append(f"{_percent(width, CARD_MPERCENT)} of the SMs all the time")
    reason = f"the guarantees together need {ratio:.2f} s of every second; beside the others there is room for "
    reason += ", or ".join(offers) or "nothing"
    if not guarantee:
        equal = PACKING_LIMIT / packing_ratio(mode, [replace(s, guarantee_ppm=PPM) for s in [*present, new]])
        reason += f"; with the same quota for all of them, {int(100 * equal)}% each would fit"
    return Refusal(reason, largest_guarantee_ppm=guarantee, largest_sm_mpercent=width)


def largest_guarantee(present: Sequence[Share], new: Share) -> int:
    """The greatest guarantee (ppm, whole tenths of a percent) at which ``new`` fits beside ``present`` in spatial mode.

    φ is convex in the guarantee asked for, and its prices give a line below it: where that line crosses the limit is
    never too small, and asking again from there converges from above (Kelley's cutting planes).
    """
    widths = [*(s.sm_mpercent for s in present), new.sm_mpercent]
    if sum(widths) <= CARD_MPERCENT:
        return PPM
    others = [s.guarantee_ppm / PPM for s in present]
    asked = 1.0
    while asked > 0:
        packing = pack(widths, [*others, asked])
        if packing.time <= PACKING_LIMIT + _TOLERANCE:
            break
        price = packing.prices[-1]
        rest = sum(p * r for p, r in zip(packing.prices, others, strict=False))
        asked = min((PACKING_LIMIT - rest) / price, asked - 1e-4) if price > _TOLERANCE else 0.0
    return int(max(asked, 0.0) * 1000 + 1e-4) * 1000


def overcommitted(mode: Mode, shares: Sequence[Share]) -> list[Share]:
    """The shares with their guarantees as weights: scaled down until they can be packed, where they cannot."""
    if fits(mode, shares):
        return list(shares)
    ratio = packing_ratio(mode, shares) / (1.0 if mode is Mode.TEMPORAL else PACKING_LIMIT)
    return [replace(s, guarantee_ppm=max(1, int(s.guarantee_ppm / ratio))) for s in shares]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g}%"


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"
