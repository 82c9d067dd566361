"""Usage from planted readings: restarts, removals, migrations, suspension, clocks that jump, and gaps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import vgpu_reading
from vgpu.integrations.claims import Claim
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.usage.account import LONGEST_NS, Account
from vgpu.usage.rows import Key, Rows, Sums

S = 1_000_000_000
GIB_S = 1 << 20  # in KiB · seconds
NOON = 1_700_000_040.0  # the begin of a minute
ID = "vgpu-0a1b2c3d"


def vgpu(busy_s: float = 0.0, **changes: Any) -> VgpuStatus:
    fields: dict[str, Any] = {"busy_ns": round(busy_s * S), "owner_uid": 1000, "memory_refusals": 0}
    return vgpu_reading(**fields | changes)


class Told:
    """An account that reads snapshots, ``at`` seconds after noon."""

    def __init__(self) -> None:
        self.account = Account()

    def __call__(self, at: float, *vgpus: VgpuStatus, wall: float | None = None) -> Told:
        self.account.read(vgpus, round((500 + at) * S), NOON + (at if wall is None else wall))
        return self

    @property
    def sums(self) -> Sums:
        return sum(self.account.rows.values(), Sums())


def test_the_first_reading_of_a_node_is_where_it_begins() -> None:
    told = Told()(0, vgpu(7))
    assert told.account.rows == {}
    told(10, vgpu(9))
    assert told.account.rows == {
        Key(60, int(NOON), 1000, ID): Sums(
            measured_ns=10 * S,
            promised_ns=3 * S,
            used_ns=2 * S,
            wasted_ns=1 * S,
            limited_ns=10 * S,
            attached_ns=10 * S,
            memory_promised_kib_s=80 * GIB_S,
            memory_used_kib_s=15 * GIB_S,
        )
    }


def test_what_one_interval_used_beyond_its_promise_does_not_make_up_for_another() -> None:
    told = Told()(0, vgpu(0))(10, vgpu(10))(20, vgpu(10))
    assert (told.sums.promised_ns, told.sums.used_ns, told.sums.wasted_ns) == (6 * S, 10 * S, 3 * S)


def test_in_spatial_mode_the_part_of_the_sms_counts() -> None:
    half = {"mode": "spatial", "sm_percent_granted": 50.0, "guarantee_ratio": 0.8, "limit_ratio": 1.0}
    told = Told()(0, vgpu(0, **half))(10, vgpu(6, **half))
    assert (told.sums.promised_ns, told.sums.used_ns, told.sums.wasted_ns) == (4 * S, 3 * S, 1 * S)


def test_a_counter_that_began_again_has_counted_from_zero() -> None:
    told = Told()(0, vgpu(100, memory_refusals=9, swaps_in=4))(10, vgpu(2, memory_refusals=1, swaps_in=3))
    assert (told.sums.used_ns, told.sums.refusals, told.sums.swaps) == (2 * S, 0, 3)
    assert told.sums.promised_ns == 3 * S


def test_a_server_that_was_killed_goes_back_to_its_journal_and_nothing_counts_twice() -> None:
    told = Told()(0, vgpu(98))(5, vgpu(100))(10, vgpu(99.5))(15, vgpu(101.5))
    assert told.sums.used_ns == 4 * S
    young = Told()(0, vgpu(0))(5, vgpu(4))(10, vgpu(3.5))
    assert young.sums.used_ns == 4 * S


def test_a_report_that_is_not_current_counts_for_nothing_until_the_server_answers() -> None:
    told = Told()(0, vgpu(1))(5, vgpu(1, state="restarting"))(10, vgpu(1, state="restarting"))
    assert told.account.rows == {}
    told(15, vgpu(3))
    assert (told.sums.measured_ns, told.sums.used_ns) == (15 * S, 2 * S)


def test_a_gap_that_is_too_long_is_not_measured() -> None:
    gap = LONGEST_NS / S
    told = Told()(0, vgpu(0))(gap + 1, vgpu(40))
    assert told.account.rows == {}
    told(gap + 11, vgpu(41))
    assert (told.sums.measured_ns, told.sums.used_ns) == (10 * S, 1 * S)


def test_what_happened_while_no_node_ran_is_not_measured() -> None:
    before = Told()(0, vgpu(0))(10, vgpu(1))
    after = Told()(600, vgpu(90))(610, vgpu(92))
    assert (before.sums + after.sums).measured_ns == 20 * S
    assert (before.sums + after.sums).used_ns == 3 * S


def test_a_migration_is_one_vgpu_even_if_one_snapshot_lacks_it() -> None:
    told = Told()(0, vgpu(0))(5, vgpu(1, leaving_to=1))(10)(15, vgpu(2, gpu_index=1, state="moving"))
    told(20, vgpu(3, gpu_index=1))
    assert set(told.account.rows) == {Key(60, int(NOON), 1000, ID)}
    assert (told.sums.measured_ns, told.sums.used_ns) == (20 * S, 3 * S)


def test_a_suspended_vgpu_keeps_its_promise() -> None:
    still = {"state": "suspended", "busy_ratio": 0.0, "wants": False, "holds": False, "processes": 1}
    told = Told()(0, vgpu(5, **still))(10, vgpu(5, **still))
    assert (told.sums.promised_ns, told.sums.wasted_ns, told.sums.used_ns) == (3 * S, 3 * S, 0)
    assert told.sums.memory_promised_kib_s == 80 * GIB_S


def test_a_new_vgpu_counts_from_its_creation_and_a_removed_one_to_its_end() -> None:
    told = Told()(0)
    told(10, vgpu(2, created_unix_s=NOON + 4))
    assert (told.sums.measured_ns, told.sums.used_ns) == (6 * S, 2 * S)
    told.account.end(vgpu(3, created_unix_s=NOON + 4, state="removing"), 512 * S, NOON + 12)
    assert (told.sums.measured_ns, told.sums.used_ns) == (8 * S, 3 * S)
    told(13, vgpu(3, created_unix_s=NOON + 4))  # a snapshot from before the removal
    told(18)
    assert told.sums.measured_ns == 8 * S


def test_one_that_came_and_went_between_two_snapshots_counts() -> None:
    told = Told()(0)
    told.account.hear(vgpu(0, created_unix_s=NOON + 1), 501 * S, NOON + 1)
    told.account.end(vgpu(1, created_unix_s=NOON + 1), 503 * S, NOON + 3)
    assert (told.sums.measured_ns, told.sums.used_ns) == (2 * S, 1 * S)


def test_a_change_counts_from_its_moment() -> None:
    told = Told()(0, vgpu(0))
    told.account.hear(vgpu(1, guarantee_ratio=0.6, limit_ratio=0.6), 504 * S, NOON + 4)
    told(10, vgpu(2, guarantee_ratio=0.6, limit_ratio=0.6))
    assert told.sums.promised_ns == round((4 * 0.3 + 6 * 0.6) * S)


def test_an_interval_is_split_at_the_minute() -> None:
    told = Told()(55, vgpu(0))(65, vgpu(2))
    assert {key.start_unix_s - NOON: sums.used_ns for key, sums in told.account.rows.items()} == {0: S, 60: S}


def test_a_clock_that_is_set_moves_rows_and_makes_no_time() -> None:
    told = Told()(0, vgpu(0))(10, vgpu(1), wall=-3600)(20, vgpu(2), wall=90_000)
    assert (told.sums.measured_ns, told.sums.used_ns) == (20 * S, 2 * S)


def test_with_mem_limit_only_mem_is_promised() -> None:
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="2G", memory_limit_bytes="8G")
    told = Told()(0, vgpu(0, spec=spec))(10, vgpu(1, spec=spec))
    assert told.sums.memory_promised_kib_s == 20 * GIB_S


def test_rows_that_were_not_written_are_taken_again_and_have_a_bound() -> None:
    account = Account()
    rows: Rows = {Key(60, 60 * n, 7, f"vgpu-{n % 900:08x}"): Sums(promised_ns=n) for n in range(20_000)}
    account.put_back(rows, {})
    assert len(account.rows) < 6_500
    assert sum(account.rows.values(), Sums()).promised_ns == sum(range(20_000))
    rows = {Key(3600, 3600 * n, 7, f"vgpu-{n % 5:08x}"): Sums(promised_ns=1) for n in range(20_000)}
    other = Account()
    other.put_back(rows, {})
    assert len(other.rows) < 5_000
    assert sum(other.rows.values(), Sums()).promised_ns == 20_000
    account.put_back(*account.take())
    assert sum(account.rows.values(), Sums()).promised_ns == sum(range(20_000))


def test_labels_name_claim_and_tenant() -> None:
    claim = Claim("dra", "pod-1", tenant="science")
    told = Told()(0, vgpu(name="web", claim=claim))(5, vgpu(name="web", claim=claim))
    label = told.account.labels[ID]
    assert (label.owner_uid, label.name, label.claim, label.tenant) == (1000, "web", "dra/pod-1", "science")


@pytest.mark.parametrize("state", ["idle", "waiting", "swapped", "idle-suspended", "failed", "starting"])
def test_a_promise_holds_in_each_state(state: str) -> None:
    told = Told()(0, vgpu(0, state=state))(10, vgpu(0, state=state))
    assert told.sums.promised_ns == 3 * S


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.floats(0, 1), st.sampled_from(["reads", "restarts", "silent", "removed"])),
        max_size=20,
    )
)
def test_used_is_what_counters_say_and_waste_is_within_the_promise(steps: list[tuple[float, float, str]]) -> None:
    told, at, busy, expected, measured = Told(), 0.0, 0, 0, 0.0
    told(at, vgpu(0))
    gap = 0.0
    for passed, part, what in steps:
        at += passed
        gap += passed
        grown = round(passed * part * S)
        if what == "restarts":
            busy = 0
        busy += grown
        if what == "silent":
            told(at, vgpu(busy / S, state="restarting"))
            continue
        lasting = gap * S <= LONGEST_NS - 1000
        if what == "removed":
            told(at)
            continue
        if abs(gap * S - LONGEST_NS) < 1000:
            return
        before = told.sums.used_ns
        told(at, vgpu_reading(busy_ns=busy, owner_uid=1000, memory_refusals=0))
        if not lasting:
            assert told.sums.used_ns == before
        measured += gap if lasting else 0.0
        gap = 0.0
        expected = told.sums.used_ns
    sums = told.sums
    assert sums.used_ns == expected
    assert abs(sums.measured_ns - measured * S) <= 1000 * (len(steps) + 1)
    assert 0 <= sums.wasted_ns <= sums.promised_ns
    assert sums.promised_ns <= sums.wasted_ns + sums.used_ns


def test_what_a_tenants_page_says_beyond_all_memory_still_fits_the_file() -> None:
    """After a year of such readings, in any sums, each figure is a number that SQLite takes."""
    most = (1 << 63) - 1
    told = Told()(0, vgpu())
    told(60, vgpu(memory_used_bytes=most, memory_refusals=most))
    told(120, vgpu(memory_used_bytes=most, memory_refusals=0))
    (worst,) = {max(told.sums.values)} if told.sums.values else {0}
    assert worst * 365 * 24 * 30 < 1 << 63
    assert max((Sums(refusals=most) + Sums(refusals=most)).values) == most
