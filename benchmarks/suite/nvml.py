"""NVML's utilisation over a window, for comparison with device timestamps: the part of its sampling period (1/6 to 1 s)
in which some kernel ran, whoever's."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any, Final, Self

EVERY_S: Final = 0.1


class Utilisation:
    """Reads it in a thread between two instants (``time.monotonic()``). Says nothing where NVML says nothing."""

    def __init__(self, gpu: int, start: float, stop: float) -> None:
        self._gpu, self._start, self._stop = gpu, start, stop
        self._seen: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(timeout=2)

    def figures(self) -> dict[str, float]:
        return {"nvml_percent": statistics.fmean(self._seen)} if self._seen else {}

    def _watch(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            gpu: Any = pynvml.nvmlDeviceGetHandleByIndex(self._gpu)
            time.sleep(max(0.0, self._start + 2 * EVERY_S - time.monotonic()))  # what it says is of the time before
            while time.monotonic() < self._stop:
                self._seen.append(float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu))
                time.sleep(EVERY_S)
        except pynvml.NVMLError:
            return
