"""Which vGPUs are suspended for a request of higher priority. Pure.

Only vGPUs of strictly lower priority are chosen, on one GPU. On each GPU they are taken in this order until the request
fits: the lowest priority, then the least memory to copy, then the youngest. Then each one that is not needed is left
out, the last one first. So no proper subset of the chosen vGPUs would do. Of the GPUs, that one is chosen whose vGPUs
have the lowest priority at most, then the least memory to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Time in parts per million of the GPU, and memory in bytes."""

    time_ppm: int
    memory_bytes: int

    def plus(self, other: Size) -> Size:
        return Size(self.time_ppm + other.time_ppm, self.memory_bytes + other.memory_bytes)

    def minus(self, other: Size) -> Size:
        return Size(self.time_ppm - other.time_ppm, self.memory_bytes - other.memory_bytes)

    def covers(self, other: Size) -> bool:
        return self.time_ppm >= other.time_ppm and self.memory_bytes >= other.memory_bytes


@dataclass(frozen=True, slots=True)
class Running:
    """A vGPU that may be suspended. ``frees``: what its GPU can promise to others then. ``copied_bytes``: the memory
    that has to leave the card."""

    vgpu_id: str
    priority: int
    frees: Size
    copied_bytes: int
    created_unix_s: float


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU that the request may have. ``asked``: what the request takes there. ``room``: what is left."""

    gpu: int
    asked: Size
    room: Size
    running: tuple[Running, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Suspend these vGPUs, and the request fits on ``gpu``."""

    gpu: int
    victims: tuple[Running, ...]


def choose(priority: int, cards: Iterable[Card]) -> Plan | None:
    """For a request of this priority. None: it fits a GPU as it is, or no vGPUs of lower priority make room for it."""
    plans = []
    for card in cards:
        if card.room.covers(card.asked):
            return None
        victims = _victims(priority, card)
        if victims:
            plans.append(Plan(card.gpu, victims))
    return min(plans, key=_cost, default=None)


def _victims(priority: int, card: Card) -> tuple[Running, ...]:
    """Empty: they do not suffice."""
    lower = [one for one in card.running if one.priority < priority]
    chosen: list[Running] = []
    room = card.room
    for one in sorted(lower, key=lambda one: (one.priority, one.copied_bytes, -one.created_unix_s, one.vgpu_id)):
        if room.covers(card.asked):
            break
        chosen.append(one)
        room = room.plus(one.frees)
    if not room.covers(card.asked):
        return ()
    return _needed(chosen, room, card.asked)


def _needed(chosen: Sequence[Running], room: Size, asked: Size) -> tuple[Running, ...]:
    """``room``: with all of them suspended."""
    kept = list(chosen)
    for one in reversed(chosen):
        if room.minus(one.frees).covers(asked):
            room = room.minus(one.frees)
            kept.remove(one)
    return tuple(kept)


def _cost(plan: Plan) -> tuple[int, int, int, int]:
    return (
        max(one.priority for one in plan.victims),
        sum(one.copied_bytes for one in plan.victims),
        len(plan.victims),
        plan.gpu,
    )
