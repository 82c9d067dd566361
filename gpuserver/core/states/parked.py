"""Parked vGPUs: they have no leases for now, and keep their accounts, for example while their memory is on the host.

A lease that was in force when its vGPU was parked may not have drained: no scheduler knows of it any more. Its use of
the GPU is charged here until it has drained, or another lease has GO beside it and is charged. The vGPU is charged
once, however many of its leases are leaving. Pure: reports and the time in, account states out. All times are
CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpuserver.core.scheduler.leases import FAR_NS, AccountState, VgpuIndex

LeaseId = tuple[VgpuIndex, int]
"""A vGPU, and the epoch of its lease."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """A vGPU's account at ``at_ns``."""

    stood: AccountState
    limit_ppm: int
    at_ns: int

    def book(self, now_ns: int) -> AccountState:
        return self.stood.refilled(self.limit_ppm, now_ns - self.at_ns)


class ParkedAccounts:
    """``key in accounts``: that vGPU is parked; iteration yields their keys. ``leaving``: for each lease that has not
    drained, from when on it is still to be charged; ``FAR_NS``: not any more."""

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

    def park(self, key: VgpuIndex, book: AccountState, limit_ppm: int, now_ns: int) -> None:
        self._stays[key] = _Stay(book, limit_ppm, now_ns)

    def change(self, key: VgpuIndex, limit_ppm: int, now_ns: int) -> None:
        self.park(key, self._stays[key].book(now_ns), limit_ppm, now_ns)

    def leave(self, key: VgpuIndex, epoch: int, since_ns: int) -> None:
        """A lease of ``key`` was in force and has not drained. ``since_ns``: ``FAR_NS`` if another one is charged."""
        self.leaving[key, epoch] = since_ns

    def unpark(self, key: VgpuIndex, now_ns: int) -> AccountState:
        """``key`` competes again, with this account."""
        self._charge(key, now_ns)
        return self._stays.pop(key).book(now_ns)

    def forget(self, key: VgpuIndex) -> bool:
        """``key`` is removed. True if it was parked."""
        self.leaving = {lease: since_ns for lease, since_ns in self.leaving.items() if lease[0] != key}
        return self._stays.pop(key, None) is not None

    def clear(self) -> None:
        self._stays.clear()
        self.leaving.clear()

    def went(self, key: VgpuIndex, epoch: int, at_ns: int) -> None:
        """That lease had GO: from here on only it is charged."""
        for lease in self.leaving:
            if lease != (key, epoch):
                self._charge(lease[0], at_ns)
                self.leaving[lease] = FAR_NS

    def drained(self, key: VgpuIndex, epoch: int, at_ns: int) -> None:
        if (key, epoch) in self.leaving:
            self._charge(key, at_ns)
            del self.leaving[key, epoch]

    def reconcile(self, outstanding: Callable[[LeaseId], bool], now_ns: int) -> None:
        """Reports were lost: each lease that is not ``outstanding`` has drained, at an unknown time."""
        for key, epoch in [lease for lease in self.leaving if not outstanding(lease)]:
            self.drained(key, epoch, now_ns)

    def _charge(self, key: VgpuIndex, until_ns: int) -> None:
        """Charge the vGPU for the union of the times in which its leases kept the GPU."""
        unpaid = {lease: at_ns for lease, at_ns in self.leaving.items() if lease[0] == key and at_ns < until_ns}
        stay = self._stays.get(key)
        if stay is None or not unpaid:
            return
        self._stays[key] = replace(stay, stood=stay.stood.overrun(until_ns - min(unpaid.values())))
        self.leaving.update(dict.fromkeys(unpaid, until_ns))
