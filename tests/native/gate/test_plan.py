"""Plans are read whole or not at all, whatever happens to their writer."""

from __future__ import annotations

import mmap
import os
import signal

from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import LeaseRecord, PlanRecord
from tests.native.tracing import killed_after_instructions, let_finish, step, traced_child

words = st.integers(0, 2**32 - 1)
times = st.integers(-(2**63), 2**63 - 1)
leases = st.builds(LeaseRecord, words, words, times, times, times)
plans = st.builds(PlanRecord, leases, leases)


def shared_grants() -> native.Grants:
    return native.Grants(mmap.mmap(-1, native.GRANTS_BYTES))


def number_of(plan: PlanRecord) -> int:
    """The one number from which ``publish_counting`` derived every word of the plan."""
    values = {*plan.current, *plan.next}
    assert len(values) == 1, f"torn: {plan}"
    return values.pop()


def test_a_fresh_page_has_no_lease() -> None:
    assert shared_grants().read() == PlanRecord()


@given(st.lists(plans, min_size=1, max_size=5))
def test_what_was_published_last_is_read(published: list[PlanRecord]) -> None:
    page = native.Grants(bytearray(native.GRANTS_BYTES))
    for plan in published:
        page.publish(plan)
        assert page.read() == plan


def test_readers_beside_a_busy_writer_see_whole_plans_in_order() -> None:
    page = shared_grants()
    writer = os.fork()
    if writer == 0:
        page.publish_counting(1, 2**31)
        os._exit(0)
    seen = [0]
    starved = 0
    distinct = 0
    while distinct < 200:
        plan = page.read()
        if plan is None:
            starved += 1
        else:
            number = number_of(plan)
            distinct += number != seen[-1]
            seen.append(number)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert seen == sorted(seen)
    last = page.read()
    assert last is not None
    assert number_of(last) >= seen[-1]
    assert starved < len(seen)


def test_a_reader_overtaken_after_any_instruction_still_reads_a_whole_plan() -> None:
    """Two publications, so that both copies are written anew, fall between two instructions of the reader."""
    page, answer = shared_grants(), shared_grants()
    old, newer, newest = (PlanRecord(*[LeaseRecord(*[n] * 5)] * 2) for n in (5, 6, 7))

    def read_and_answer() -> None:
        plan = page.stepped_read()
        assert plan is not None
        answer.publish(plan)

    seen: list[int] = []
    through = False
    while not through:
        page.publish(old)
        reader = traced_child(read_and_answer)
        through = not all(step(reader) for _ in range(len(seen)))
        page.publish(newer)
        page.publish(newest)
        while not through and step(reader):
            pass
        let_finish(reader)
        plan = answer.read()
        assert plan is not None
        seen.append(number_of(plan))
    assert seen[0] == 7
    assert seen[-1] == 5
    assert set(seen) == {5, 7}


def test_a_writer_killed_after_any_instruction_leaves_a_whole_plan() -> None:
    page = shared_grants()
    old, new, repaired = (PlanRecord(*[LeaseRecord(*[n] * 5)] * 2) for n in (5, 6, 7))
    seen = []
    page.publish(old)
    for _ in killed_after_instructions(lambda: page.stepped_publish(new)):
        plan = page.read()
        assert plan in (old, new)
        seen.append(plan)
        page.publish(repaired)
        assert page.read() == repaired
        page.publish(old)
    assert set(seen) == {old, new}
