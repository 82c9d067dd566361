"""vGPUs on the bench: they have no leases for now, with their accounts kept, as while their memory is on the host.

A lease that was in force as its vGPU went may not have drained: no scheduler knows of it any more. Until it has, or
another lease has GO beside it and is charged, what it keeps of the GPU is charged here: once, however many of a vGPU's
leases are leaving. Pure: what is seen and the time in, books out. All times are CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpuserver.core.scheduler.leases import FAR_NS, AccountState, VgpuIndex

LeaseId = tuple[VgpuIndex, int]
"""A vGPU, and the epoch of its lease."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """How a vGPU stood at ``at_ns``."""

    stood: AccountState
    limit_ppm: int
    at_ns: int

    def book(self, now_ns: int) -> AccountState:
        return self.stood.refilled(self.limit_ppm, now_ns - self.at_ns)


class ParkedAccounts:
    """``key in bench``: that vGPU is on it; iterated, their keys. ``leaving``: of each lease that has not drained, from
    when on it is still to be charged; ``FAR_NS``: not any more."""

    def __init__(self) -> None:
        self._stays: dict[VgpuIndex, _Stay] = {}
        self.leaving: dict[LeaseId, int] = {}

    def __contains__(self, key: VgpuIndex) -> bool:
        return key in self._stays

    def __iter__(self) -> Iterator[VgpuIndex]:
        return iter(self._stays)

    def books(self, now_ns: int) -> dict[VgpuIndex, AccountState]:
        return {key: stay.book(now_ns) for key, stay in self._stays.items()}

    def book(self, key: VgpuIndex, now_ns: int) -> AccountState:
        return self._stays[key].book(now_ns)

    def sit(self, key: VgpuIndex, book: AccountState, limit_ppm: int, now_ns: int) -> None:
        self._stays[key] = _Stay(book, limit_ppm, now_ns)

    def change(self, key: VgpuIndex, limit_ppm: int, now_ns: int) -> None:
        self.sit(key, self._stays[key].book(now_ns), limit_ppm, now_ns)

    def leave(self, key: VgpuIndex, epoch: int, since_ns: int) -> None:
        """A lease of ``key`` was in force and has not drained. ``since_ns``: ``FAR_NS`` if another one is charged."""
        self.leaving[key, epoch] = since_ns

    def rise(self, key: VgpuIndex, now_ns: int) -> AccountState:
        """``key`` competes again, with this book."""
        self._charge(key, now_ns)
        return self._stays.pop(key).book(now_ns)

    def forget(self, key: VgpuIndex) -> bool:
        """``key`` is removed. Whether it was on the bench."""
        self.leaving = {lease: since_ns for lease, since_ns in self.leaving.items() if lease[0] != key}
        return self._stays.pop(key, None) is not None

    def clear(self) -> None:
        self._stays.clear()
        self.leaving.clear()

    def went(self, key: VgpuIndex, epoch: int, at_ns: int) -> None:
        """That lease had GO: from here on it is charged, and nobody beside it."""
        for lease in self.leaving:
            if lease != (key, epoch):
                self._charge(lease[0], at_ns)
                self.leaving[lease] = FAR_NS

    def drained(self, key: VgpuIndex, epoch: int, at_ns: int) -> None:
        if (key, epoch) in self.leaving:
            self._charge(key, at_ns)
            del self.leaving[key, epoch]

    def reconcile(self, outstanding: Callable[[LeaseId], bool], now_ns: int) -> None:
        """Reports were lost: whatever is not ``outstanding`` has drained, nobody knows when."""
        for key, epoch in [lease for lease in self.leaving if not outstanding(lease)]:
            self.drained(key, epoch, now_ns)

    def _charge(self, key: VgpuIndex, until_ns: int) -> None:
        """For the union of what its leases have kept of the GPU."""
        unpaid = {lease: at_ns for lease, at_ns in self.leaving.items() if lease[0] == key and at_ns < until_ns}
        stay = self._stays.get(key)
        if stay is None or not unpaid:
            return
        self._stays[key] = replace(stay, stood=stay.stood.overrun(until_ns - min(unpaid.values())))
        self.leaving.update(dict.fromkeys(unpaid, until_ns))
