"""What a recording must show before a lease counts as lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from tests.trace.recordings import BEGIN, lease
from vgpu.trace.recording import Recording
from vgpu.verify import kills

MS = 1_000_000
KILLED_NS = BEGIN + 1000 * MS


def recording(end_ms: int, *leases: Any) -> Recording:
    made = Recording(cast(Any, None), 0, KILLED_NS + end_ms * MS)
    made.leases.extend(leases)
    return made


@pytest.mark.parametrize("begins_ms", [900, None])
def test_the_recording_goes_on_until_the_neighbour_has_a_lease(begins_ms: int | None) -> None:
    """Chunks arrive late on a busy machine, and so does the lease."""
    before = lease("b", 1, 990 * MS, 995 * MS, 995 * MS)
    after = [] if begins_ms is None else [lease("b", 2, (1000 + begins_ms) * MS, None, None)]
    collector = SimpleNamespace(recording=None, error=None)

    async def record() -> None:
        for found in (recording(200, before), recording(600, before), recording(2600, before, *after)):
            await trio.sleep(0.02)
            collector.recording = found

    async def main() -> list[Any]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(record)
            return list(await kills._leases_after(cast(Any, collector), KILLED_NS, "b", 2.5))

    assert trio.run(main) == [before, *after]
