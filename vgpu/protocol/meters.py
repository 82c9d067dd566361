"""What a GPU Server counts and concludes, beyond the present state: parts of the control link's readings."""

from __future__ import annotations

from vgpu.protocol.hello import Reading
from vgpu.protocol.printed import Line


class Histogram(Reading):
    """A distribution of durations since the server started. ``counts[i]``: those of at most ``bounds_ns[i]`` and more
    than the bound before it. There is one more count than bounds: the last one, of all that lasted longer."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    sum_ns: int


class VgpuMeters(Reading):
    """``waits``: from wanting a token without having one, to GO."""

    vgpu_id: str
    gpu_index: int
    waits: Histogram


class GpuMeters(Reading):
    """``handovers``: from one vGPU's drain to the next one's GO, if the next one was waiting; both are the dispatcher's
    own times. ``loop_lag``: how late the server's loop ran what was due."""

    gpu_index: int
    handovers: Histogram
    loop_lag: Histogram


class Advice(Reading):
    """A size for a vGPU, from what its programs used. ``observed_ns``: how long they were observed, counting only
    seconds in which they used the GPU at all. ``busy_ratio``: they used less than this part of one GPU's time in 95 of
    100 such seconds. ``memory_peak_bytes``: the most they had. ``sm_percent``, ``memory_bytes``: the size to ask for,
    with room to spare. None: too little was observed, or (sm_percent) the vGPU's own limit may have held it back.
    ``text``: the same in a sentence, with what to type."""

    observed_ns: int
    busy_ratio: float
    memory_peak_bytes: int
    sm_percent: float | None
    memory_bytes: int | None
    text: Line
