"""When the GPU worked for this process, by CUPTI's activity records: the device's own timestamps and nothing else.

A profiler for people records every call of the host as well, and slows it: a trainer that keeps the GPU busy for 95 %
of the time does so for 85–94 % under PyTorch's. Here the host's part is CUPTI's own interception of launches.

Records are kept as CUPTI fills its buffers and read when recording is over. Fields that are read stand where they do
since CUDA 8 (``CUpti_ActivityKernel4``, ``…Memcpy``, ``…Memset``, ``…GraphTrace`` in cupti_activity.h).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, byref, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from benchmarks.suite.report.stats import Interval

LIBRARIES: Final = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
BUFFER_BYTES: Final = 8 << 20
MEMCPY, MEMSET, CONCURRENT_KERNEL, MEMCPY2, GRAPH_TRACE = 1, 2, 10, 22, 49
START_AT: Final = {MEMCPY: 16, MEMSET: 16, CONCURRENT_KERNEL: 16, MEMCPY2: 16, GRAPH_TRACE: 8}
"""Kind of record → where its start is; its end follows. A graph is one record: one for each of its kernels would slow
it down."""
FORCED: Final = 1

_Requested = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_Completed = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)


class ActivityLost(RuntimeError):
    """CUPTI could not be used, or dropped records."""


class Activity:
    """The process's one recorder. ``recording`` may be entered again, but not within itself."""

    def __init__(self) -> None:
        self._cupti = self._library()
        self._lent: dict[int, Any] = {}
        self._filled: list[tuple[Any, int]] = []
        self._callbacks = _Requested(self._lend), _Completed(self._take)  # CUPTI calls them for as long as it lives
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    @staticmethod
    def _library() -> ctypes.CDLL:
        for name in LIBRARIES:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        raise ActivityLost(f"none of {', '.join(LIBRARIES)} can be loaded: install CUDA's CUPTI, or leave stamps out")

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cupti, name)(*arguments)
        if result:
            raise ActivityLost(f"{name} failed with CUptiResult {result}")

    def _lend(self, buffer: Any, size: Any, most: Any) -> None:
        room = ctypes.create_string_buffer(BUFFER_BYTES)
        address = ctypes.addressof(room)
        self._lent[address] = room
        buffer[0], size[0], most[0] = address, BUFFER_BYTES, 0

    def _take(self, _context: int, _stream: int, buffer: int, _size: int, valid: int) -> None:
        self._filled.append((self._lent.pop(buffer), valid))

    @contextmanager
    def recording(self, finish: Callable[[], object]) -> Iterator[Callable[[], list[Interval]]]:
        """Yields what gives all intervals, CLOCK_MONOTONIC ns, after the block; ``finish`` waits for the GPU."""
        self._filled.clear()
        for kind in START_AT:
            self._call("cuptiActivityEnable", kind)
        try:
            yield self._intervals
            finish()
            self._call("cuptiActivityFlushAll", FORCED)
        finally:
            for kind in START_AT:
                self._call("cuptiActivityDisable", kind)

    def _intervals(self) -> list[Interval]:
        dropped = c_size_t()
        self._call("cuptiActivityGetNumDroppedRecords", None, 0, byref(dropped))
        if dropped.value:
            raise ActivityLost(f"CUPTI dropped {dropped.value} records: choose fewer --seconds")
        offset_ns = self._offset_ns()
        return [
            (start + offset_ns, end + offset_ns)
            for buffer, valid in self._filled
            for start, end in self._records(buffer, valid)
            if 0 < start <= end
        ]

    def _offset_ns(self) -> int:
        """From CUPTI's clock to CLOCK_MONOTONIC, by the closest of a few looks at both."""
        looks = []
        for _ in range(20):
            stamp, before = c_uint64(), time.monotonic_ns()
            self._call("cuptiGetTimestamp", byref(stamp))
            after = time.monotonic_ns()
            looks.append((after - before, (before + after) // 2 - stamp.value))
        return min(looks)[1]

    def _records(self, buffer: Any, valid: int) -> Iterator[Interval]:
        step, record = self._cupti.cuptiActivityGetNextRecord, c_void_p()
        address, room = c_void_p(ctypes.addressof(buffer)), c_size_t(valid)
        while step(address, room, byref(record)) == 0:
            assert record.value is not None
            at = START_AT.get(c_uint32.from_address(record.value).value)
            if at is not None:
                start, end = (c_uint64 * 2).from_address(record.value + at)
                yield start, end
