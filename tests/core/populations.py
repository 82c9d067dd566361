"""Hypothesis strategies: populations of vGPUs with their shares and their work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.core.model import MS, US, Run, Work
from tests.core.timeline import Watch
from vgpu.share import PPM, Priority, Share


@dataclass(frozen=True)
class Population:
    shares: tuple[Share, ...]
    works: tuple[Work, ...]
    seed: int
    together: bool = False

    def run(self, scheduler: Any, watch: Watch | None = None) -> Run:
        """At its beginning."""
        return Run(
            scheduler,
            list(self.shares),
            list(self.works),
            seed=self.seed,
            watch=watch,
            together=self.together,
            taking=True,
        )


@st.composite
def works(draw: st.DrawFn, longest_ms: int = 30) -> Work:
    kernel = draw(st.sampled_from([k for k in (MS, 2 * MS, 5 * MS, 30 * MS) if k <= longest_ms * MS]))
    steady = draw(st.booleans())
    return Work(
        kernel_ns=kernel,
        jitter=draw(st.sampled_from([0.0, 0.05, 0.3])),
        refill_ns=draw(st.sampled_from([0, 100 * US, 400 * US])),
        burst=None if steady else draw(st.integers(1, 30)),
        pause_ns=0 if steady else draw(st.integers(1, 200)) * MS,
        start_ns=draw(st.integers(0, 600)) * MS,
    )


@st.composite
def temporal_populations(draw: st.DrawFn, *, priorities: bool = False) -> Population:
    """Two to five vGPUs whose guarantees fit; some with a limit of their own."""
    parts = draw(st.lists(st.integers(3, 60), min_size=2, max_size=5))
    scale = max(100, sum(parts))
    shares = []
    for part in parts:
        guarantee = part * PPM // scale
        limit = PPM
        if draw(st.integers(0, 3)) == 0:
            limit = min(PPM, guarantee * draw(st.sampled_from([100, 130, 200])) // 100)
        priority = draw(st.sampled_from(list(Priority))) if priorities else Priority.NORMAL
        shares.append(Share(guarantee, limit, priority=priority))
    tails = st.booleans()
    drawn = [replace(draw(works()), tails=draw(tails)) for _ in parts]
    return Population(tuple(shares), tuple(drawn), draw(st.integers(0, 2**16)), draw(st.booleans()))
