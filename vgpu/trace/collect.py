"""Recordings of several GPUs of a node at the same time, each on a link and in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.trace.recording import Recording

LOOK_S = 0.1


class Collector:
    """The recording of one GPU, from ``link``. ``error``: why it ended early, if it did."""

    def __init__(self, link: ControlLink, gpu: str, duration_ns: int) -> None:
        self.recording: Recording | None = None
        self.error: VgpuError | None = None
        self._stopped = False
        self._link = link
        self._thread = threading.Thread(target=self._collect, args=(gpu, duration_ns), daemon=True)
        self._thread.start()

    def _collect(self, gpu: str, duration_ns: int) -> None:
        try:
            for chunk in self._link.trace(gpu, duration_ns):
                if self.recording is None:
                    self.recording = Recording.beginning_with(chunk)
                else:
                    self.recording.add(chunk)
        except VgpuError as error:
            self.error = None if self._stopped else error
        if self.recording is not None:
            self.recording.close()

    def ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it now, with what there is. The server notices at once."""
        self._stopped = True
        self._link.hang_up()
        self._thread.join()


def collect(gpus: Sequence[str], duration_ns: int, show: Callable[[float], None]) -> list[Recording]:
    """What happens on ``gpus`` for ``duration_ns``; ``show`` is told the seconds that have passed. Ctrl-C ends it.

    ``VgpuError``: nothing at all was recorded, and why. A part that ended early is in the result, and not ``whole``.
    """
    links: list[ControlLink] = []
    collectors: list[Collector] = []
    try:
        links.extend(ControlLink() for _ in gpus)
        began_s = time.monotonic()
        collectors += [Collector(link, gpu, duration_ns) for link, gpu in zip(links, gpus, strict=True)]
        try:
            while not all(collector.ended(LOOK_S / len(collectors)) for collector in collectors):
                show(time.monotonic() - began_s)
        except KeyboardInterrupt:
            for collector in collectors:
                collector.stop()
    finally:
        for link in links:
            link.close()
    recordings = [collector.recording for collector in collectors if collector.recording is not None]
    if not recordings:
        raise next((c.error for c in collectors if c.error is not None), None) or KeyboardInterrupt
    return recordings
