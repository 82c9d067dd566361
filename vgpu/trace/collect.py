"""Recordings of several GPUs of a node at the same time, each on a link and in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.trace.recording import Recording

LOOK_S = 0.1


class Collector:
    """The recording of one GPU, from ``link``. ``error``: why it ended early, if it did. ``work`` False: only leases
    and waits."""

    def __init__(self, link: ControlLink, gpu: str, duration_ns: int, *, work: bool = True) -> None:
        self.recording: Recording | None = None
        self.error: VgpuError | None = None
        self._stopped = False
        self._link = link
        self._thread = threading.Thread(target=self._collect, args=(gpu, duration_ns, work), daemon=True)
        self._thread.start()

    def _collect(self, gpu: str, duration_ns: int, work: bool) -> None:
        try:
            for chunk in self._link.trace(gpu, duration_ns, work=work):
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


def collect(
    gpus: Sequence[str], duration_ns: int, show: Callable[[float], None], control_socket: Path | None = None
) -> tuple[list[Recording], dict[str, VgpuError]]:
    """Recordings of ``gpus`` for ``duration_ns``, and by GPU why a recording ended early or is not there. Ctrl-C ends
    it. ``show`` is called with the seconds that have passed. ``control_socket``: by default of the environment's node.

    ``VgpuError``: nothing at all was recorded.
    """
    links: list[ControlLink] = []
    collectors: dict[str, Collector] = {}
    try:
        links.extend(ControlLink(control_socket) for _ in gpus)
        began_s = time.monotonic()
        for gpu, link in zip(gpus, links, strict=True):
            collectors[gpu] = Collector(link, gpu, duration_ns)
        try:
            while not all(collector.ended(LOOK_S / len(gpus)) for collector in collectors.values()):
                show(time.monotonic() - began_s)
        except KeyboardInterrupt:
            for collector in collectors.values():
                collector.stop()
    finally:
        for link in links:
            link.close()
    recordings = [collector.recording for collector in collectors.values() if collector.recording is not None]
    errors = {gpu: collector.error for gpu, collector in collectors.items() if collector.error is not None}
    if not recordings:
        raise next(iter(errors.values()), None) or KeyboardInterrupt
    return recordings, errors
