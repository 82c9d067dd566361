"""What a GPU Server counts and concludes, beyond how things stand: parts of the control link's readings."""

from __future__ import annotations

from vgpu.protocol.hello import Reading
from vgpu.protocol.printed import Line


class Histogram(Reading):
    """How often something lasted how long, since the server started. ``counts[i]``: at most ``bounds_ns[i]`` and more
    than the bound before it; the last count, one more than there are bounds, is of all that lasted longer."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    sum_ns: int


class VgpuMeters(Reading):
    """``waits``: from wanting a token without having one, to GO."""

    vgpu_id: str
    gpu_index: int
    waits: Histogram


class GpuMeters(Reading):
    """``handovers``: from one vGPU's drain to the next one's GO, where the next one was waiting; both are the
    dispatcher's own times. ``loop_lag``: how late the server's loop came to what was due."""

    gpu_index: int
    handovers: Histogram
    loop_lag: Histogram


class Advice(Reading):
    """A size for a vGPU, from what its programs used. ``observed_ns``: for how long they have been seen at work, in
    seconds in which they used the GPU at all. ``busy_ratio``: of one GPU's time, what they stayed below in 95 of 100
    such seconds; ``memory_peak_bytes``: the most they had. ``sm_percent``, ``memory_bytes``: with room to spare, what
    to ask for; None: too little was seen, or (sm_percent) its own limit may be what held it back. ``text``: in a
    sentence, with what to type."""

    observed_ns: int
    busy_ratio: float
    memory_peak_bytes: int
    sm_percent: float | None
    memory_bytes: int | None
    text: Line
