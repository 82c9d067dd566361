"""A vGPU's program past the hook is answered once, after the grace period, and nobody else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.observe.unmanaged import GRACE_NS, Respond, Response, Sighting, Unmanaged
from vgpu.identity import Process


def seen(pid: int, vgpu_id: str = "vgpu-00000001", start_time: int = 5) -> Sighting:
    return Sighting(Process(pid, start_time), 1000, "python", 1 << 30, vgpu_id)


def test_after_the_grace_period_once() -> None:
    judge = Unmanaged(Response.KILL)
    assert judge.see([seen(7)], 0) == []
    assert judge.see([seen(7)], GRACE_NS - 1) == []
    assert judge.see([seen(7)], GRACE_NS) == [Respond(seen(7), Response.KILL)]
    assert judge.see([seen(7)], 2 * GRACE_NS) == []


def test_who_comes_into_its_vgpu_meanwhile_begins_anew() -> None:
    judge = Unmanaged(Response.KILL)
    judge.see([seen(7)], 0)
    judge.see([], 1)
    assert judge.see([seen(7)], GRACE_NS) == []


def test_another_process_of_the_same_pid_is_another() -> None:
    judge = Unmanaged(Response.KILL)
    judge.see([seen(7)], 0)
    assert judge.see([seen(7, start_time=6)], GRACE_NS) == []


sightings = st.builds(seen, st.integers(1, 4), st.sampled_from(["", "vgpu-00000001"]), st.integers(0, 2))


@given(st.lists(st.tuples(st.integers(0, GRACE_NS), st.lists(sightings, max_size=4)), max_size=20))
def test_never_without_evidence_nor_within_the_grace_period(steps: list[tuple[int, list[Sighting]]]) -> None:
    judge = Unmanaged(Response.SUSPEND)
    now_ns, since = 0, dict[Process, int]()
    for passed_ns, found in steps:
        now_ns += passed_ns
        tied = {one.process for one in found if one.vgpu_id and one.process.start_time}
        since = {process: since.get(process, now_ns) for process in tied}
        for command in judge.see(found, now_ns):
            assert command.sighting.vgpu_id
            assert now_ns - since[command.sighting.process] >= GRACE_NS
