"""The registry against a list of promises that is obviously right, and its decisions one by one."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gpuserver.core.admission.registry import (
    MAX_VGPUS,
    GpuCapacity,
    Owner,
    PerUser,
    Registry,
    VgpuRecord,
    refusal_error,
)
from vgpu.errors import ErrorCode, VgpuError
from vgpu.packing.admission import Refusal, fits
from vgpu.share import Mode, Priority, Share
from vgpu.spec import VgpuChanges, VgpuSpec

GIB = 1 << 30
H200 = GpuCapacity(140 * GIB, 132)
ME = Owner(1000)


def registry(mode: Mode = Mode.TEMPORAL, card: GpuCapacity = H200) -> Registry:
    return Registry(card, mode)


def create(found: Registry, vgpu_id: str, **fields: Any) -> VgpuRecord:
    record = found.create(vgpu_id, VgpuSpec.parse(**({"memory_bytes": "1G"} | fields)), ME, 0)
    found.check()
    return record


def refused(code: ErrorCode, found: Registry, vgpu_id: str, **fields: Any) -> VgpuError:
    before = list(found)
    with pytest.raises(VgpuError) as caught:
        create(found, vgpu_id, **fields)
    assert caught.value.code is code
    assert list(found) == before, "a refusal changes nothing"
    return caught.value


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"sm_percent": 30}, Share(300_000, 300_000)),
        ({"sm_percent": 12, "quota_limit_percent": 40}, Share(48_000, 48_000)),
        ({"sm_percent": 50, "quota_request_percent": 20, "quota_limit_percent": 60}, Share(100_000, 300_000)),
        ({"sm_percent": 30, "burst": True}, Share(300_000, 1_000_000, bursts=True)),
        ({"fraction": "1/3", "priority": "high"}, Share(333_333, 333_333, priority=Priority.HIGH)),
    ],
)
def test_what_a_specification_means_in_temporal_mode(fields: dict[str, Any], share: Share) -> None:
    assert create(registry(), "a", **fields).share == replace(share, shareable=True)


@pytest.mark.parametrize(
    "fields", [{"lease": "exclusive"}, {"group": "trainer"}, {"oversubscribe": "swap"}, {"oversubscribe": "managed"}]
)
def test_which_vgpus_never_share(fields: dict[str, Any]) -> None:
    assert not create(registry(), "a", sm_percent=30, **fields).share.shareable


def test_bounds_of_compute_need_temporal_mode() -> None:
    """A process under MPS keeps its SMs for life."""
    found = registry()
    record = create(found, "a", sm_percent="20..60", memory_bytes="1G..2G")
    assert record.share.guarantee_ppm == record.share.limit_ppm == 200_000
    grown = found.change("a", VgpuChanges(sm_percent=50, sm_range_percent=(20, 60)), 0)
    assert grown.share.guarantee_ppm == 500_000
    with pytest.raises(VgpuError, match="keeps its SMs for life") as caught:
        found.set_mode(Mode.SPATIAL)
    assert caught.value.code is ErrorCode.MODE
    found.change("a", VgpuChanges(sm_percent=30), 0)
    found.set_mode(Mode.SPATIAL)
    for refuse in (
        lambda: create(found, "b", sm_percent="20..60"),
        lambda: found.change("a", VgpuChanges.parse(sm_percent="20..60"), 0),
    ):
        with pytest.raises(VgpuError, match="spatial mode") as caught:
            refuse()
        assert caught.value.code is ErrorCode.MODE
    assert found["a"].spec.memory_range_bytes is not None


@pytest.mark.parametrize(
    ("fields", "share", "sms"),
    [
        ({"sm_percent": 30}, Share(1_000_000, 1_000_000, 30_303), 40),
        ({"sm_percent": 12, "quota_limit_percent": 40}, Share(400_000, 400_000, 12_121), 16),
        ({"sm_percent": 5}, Share(1_000_000, 1_000_000, 6_060), 8),
    ],
)
def test_what_a_specification_means_in_spatial_mode(fields: dict[str, Any], share: Share, sms: int) -> None:
    record = create(registry(Mode.SPATIAL), "a", **fields)
    assert record.share == share
    assert record.partition is not None
    assert record.partition.granted_sms == sms


def test_a_share_too_many_is_refused_with_the_largest_that_fits() -> None:
    found = registry()
    create(found, "a", sm_percent=30)
    create(found, "b", sm_percent=55)
    assert "--sm 15" in refused(ErrorCode.NO_ROOM, found, "c", sm_percent=16).hint
    assert "--sm 30" in refused(ErrorCode.NO_ROOM, found, "c", sm_percent=40, quota_request_percent=50).hint
    create(found, "c", sm_percent=15)
    assert "vgpuctl rm" in refused(ErrorCode.NO_ROOM, found, "d", sm_percent=1).hint


@pytest.mark.parametrize(
    ("fields", "offer"),
    [
        ({"largest_memory_bytes": 3 * GIB + 5}, "the largest that fits: --mem 3072M"),
        ({"largest_memory_bytes": 64 << 20}, "the largest that fits: --mem 64M"),
        ({"largest_memory_bytes": (64 << 20) - 1}, None),
        ({"largest_guarantee_ppm": 204_999}, "the largest that fits: --sm 40.9"),  # of half the time
        (
            {"largest_guarantee_ppm": 204_999, "largest_memory_bytes": 3 * GIB},
            "the largest that fits: --sm 40.9 --mem 3072M",
        ),
        ({"largest_guarantee_ppm": 204_999, "largest_memory_bytes": 0}, None),
        ({"largest_guarantee_ppm": 5_000}, "the largest that fits: --sm 1"),
        ({"largest_guarantee_ppm": 4_999}, None),
        (
            {"largest_guarantee_ppm": 450_000, "largest_sm_mpercent": 12_345},
            "the largest that fits: --sm 12.3 or --quota-request 45",
        ),
        ({"largest_guarantee_ppm": 10_000, "largest_sm_mpercent": 999}, "the largest that fits: --quota-request 1"),
        (
            {"largest_guarantee_ppm": 450_000, "largest_sm_mpercent": 12_345, "largest_memory_bytes": GIB},
            "the largest that fits: --sm 12.3 --mem 1024M or --quota-request 45 --mem 1024M",
        ),
        ({"largest_guarantee_ppm": 9_999, "largest_sm_mpercent": 6_060}, "the largest that fits: --sm 6"),  # 8 SMs
        ({"largest_guarantee_ppm": 9_999, "largest_sm_mpercent": 6_059}, None),
        ({"largest_guarantee_ppm": 0, "largest_sm_mpercent": 0}, None),
    ],
)
def test_an_offer_is_made_in_the_options_that_were_typed(fields: dict[str, int], offer: str | None) -> None:
    error = refusal_error(Refusal("no room", **fields), VgpuSpec.parse(sm_percent=80, quota_limit_percent=50), 132)
    assert (error.code, error.message) == (ErrorCode.NO_ROOM, "no room")
    assert error.hint == (offer or "make room: vgpuctl rm ID")


@pytest.mark.parametrize(
    ("uid", "hint"),
    [
        (1000, "make room: vgpuctl rm ID"),
        (0, "make room: vgpuctl rm ID"),
        (2000, "its room is promised to vGPUs of other users: vgpuctl ls"),
    ],
)
def test_only_a_user_that_can_make_room_is_asked_for_it(uid: int, hint: str) -> None:
    found = registry()
    create(found, "a", sm_percent=100)
    with pytest.raises(VgpuError) as caught:
        found.create("b", VgpuSpec.parse(sm_percent=20, memory_bytes="1G"), Owner(uid), 0)
    assert (caught.value.code, caught.value.hint) == (ErrorCode.NO_ROOM, hint)


def test_all_that_does_not_fit_is_said_and_an_offer_for_all_of_it() -> None:
    found = registry()
    create(found, "a", sm_percent=55, memory_bytes="43G")
    error = refused(ErrorCode.NO_ROOM, found, "b", sm_percent=90, memory_bytes="98G")
    assert error.message == (
        "98 GiB of memory asked for, 97 GiB of 140 GiB are left; 90% of the GPU's time asked for, 45% is left"
    )
    assert error.hint == "the largest that fits: --sm 45 --mem 99328M"
    create(found, "b", sm_percent=45, memory_bytes="99328M")


def test_memory_is_promised_once_whatever_the_compute() -> None:
    found = registry()
    create(found, "a", sm_percent=10, memory_bytes="100G")
    assert "--mem 40960M" in refused(ErrorCode.NO_ROOM, found, "b", sm_percent=10, memory_bytes="41G").hint
    refused(ErrorCode.NO_ROOM, found, "b", sm_percent=10, memory_bytes="41G", overcommit=True)
    create(found, "b", sm_percent=10, memory_bytes="40G")


def test_overcommitted_vgpus_share_what_the_promised_leave() -> None:
    found = registry()
    create(found, "hard", sm_percent=60)
    create(found, "soft", sm_percent=60, overcommit=True)
    create(found, "softer", sm_percent=20, overcommit=True)
    assert {r.vgpu_id: r.share.guarantee_ppm // 1000 for r in found} == {"hard": 600, "soft": 300, "softer": 100}
    assert found["soft"].share.limit_ppm == 600_000
    assert isinstance(found["soft"].share.guarantee_ppm, int)
    create(found, "harder", sm_percent=20)
    assert {r.vgpu_id: r.share.guarantee_ppm // 1000 for r in found} == {
        "hard": 600, "soft": 150, "softer": 50, "harder": 200,
    }  # fmt: skip
    found.remove("hard")
    assert {r.vgpu_id: r.share.guarantee_ppm // 1000 for r in found} == {"soft": 600, "softer": 200, "harder": 200}


def test_a_change_is_admitted_like_a_newcomer() -> None:
    found = registry()
    create(found, "a", sm_percent=30, ttl_ns="1h", name="first")
    create(found, "b", sm_percent=60)
    changed = found.change("a", VgpuChanges.parse(sm_percent=40, memory_bytes="2G"), now_unix_ns=7)
    assert (changed.share.guarantee_ppm, changed.memory_limit_bytes, changed.key) == (400_000, 2 * GIB, found["a"].key)
    assert changed.expires_unix_ns == 3600 * 10**9
    assert (changed.owner, changed.created_unix_ns) == (ME, 0)
    before = list(found)
    with pytest.raises(VgpuError):
        found.change("a", VgpuChanges.parse(sm_percent=41), now_unix_ns=8)
    assert list(found) == before
    later = found.change("a", VgpuChanges.parse(ttl_ns="2h"), now_unix_ns=5)
    assert later.expires_unix_ns == 7200 * 10**9 + 5


def test_names_are_unique_and_free_again() -> None:
    found = registry()
    create(found, "a", sm_percent=10, name="x")
    error = refused(ErrorCode.EXISTS, found, "b", sm_percent=10, name="x")
    assert str(error) == "a has the name 'x' already; choose another --name; vgpuctl rm x removes that one"
    assert str(refused(ErrorCode.EXISTS, found, "a", sm_percent=10)) == "a exists already"
    found.change("a", VgpuChanges.parse(name="y"), 0)
    create(found, "b", sm_percent=10, name="x")


def test_a_name_is_one_owners() -> None:
    found = registry()
    spec = VgpuSpec.parse(sm_percent=10, memory_bytes="1G", name="x")
    found.create("a", spec, Owner(1), 0)
    found.create("b", spec, Owner(2), 0)
    with pytest.raises(VgpuError, match="a has the name 'x' already"):
        found.create("c", spec, Owner(1), 0)
    found.check()


@pytest.mark.parametrize("name", ["0123abcd", "0123ABCD", "deadbeef", "12345678"])
def test_a_name_that_looks_like_an_id_is_refused_and_an_old_one_stays(name: str) -> None:
    found = registry()
    refused(ErrorCode.INVALID, found, "a", sm_percent=10, name=name)
    create(found, "a", sm_percent=10, name="x")
    with pytest.raises(VgpuError, match="looks like a vGPU's id"):
        found.change("a", VgpuChanges.parse(name=name), 0)
    found.restore([("b", 7, VgpuSpec.parse(sm_percent=10, name=name), ME, 0, None, False)])
    found.change("b", VgpuChanges.parse(sm_percent=11), 0)


def test_a_user_has_a_part_of_the_vgpus_and_some_are_kept_for_root() -> None:
    found = Registry(H200, Mode.TEMPORAL, PerUser(most=64, kept=16, exempt=frozenset({0, 500})))
    small = VgpuSpec.parse(sm_percent=1, memory_bytes="64M", overcommit=True)

    ids = (f"v{n}" for n in count())

    def make(uid: int) -> str:
        try:
            found.create(next(ids), small, Owner(uid), 0)
        except VgpuError as error:
            return error.message if error.code is ErrorCode.NO_ROOM else error.code
        return ""

    for uid in (1, 2, 3):
        assert {make(uid) for _ in range(64)} == {""}
        assert make(uid) == f"uid {uid} has 64 vGPUs on this GPU, a user's most"
    assert {make(4) for _ in range(48)} == {""}
    for uid in (4, 5):
        assert make(uid) == "this GPU has 240 vGPUs, and keeps the last 16 for root"
    assert {make(uid) for uid in (0, 500) for _ in range(8)} == {""}
    assert make(0) == f"this GPU has {MAX_VGPUS} vGPUs, its most"
    found.remove("v0")
    assert make(1) == "this GPU has 255 vGPUs, and keeps the last 16 for root"


def test_expiry() -> None:
    found = registry()
    found.create("a", VgpuSpec.parse(sm_percent=10, ttl_ns=100), ME, 1000)
    found.create("b", VgpuSpec.parse(sm_percent=10), ME, 1000)
    assert found.expired(1099) == []
    assert [r.vgpu_id for r in found.expired(1100)] == ["a"]
    found.create("c", VgpuSpec.parse(sm_percent=10, ttl_ns=50), ME, 1000)
    found.set_mode(Mode.SPATIAL)
    record = found["a"]
    assert (record.owner, record.created_unix_ns, record.expires_unix_ns) == (ME, 1000, 1100)
    for vgpu_id in ("a", "c"):
        found.remove(vgpu_id)
    assert "a" not in found
    assert "b" in found


def test_keys_are_used_again_and_run_out() -> None:
    found = registry(card=GpuCapacity(1 << 50, 132))
    tiny = VgpuSpec.parse(memory_bytes="1G", sm_percent=1, overcommit=True)
    for n in range(256):
        found.create(f"v{n}", tiny, ME, 0)
    found.check()
    error = refused(ErrorCode.NO_ROOM, found, "one more", sm_percent=1, overcommit=True)
    assert str(error) == "this GPU has 256 vGPUs, its most; remove one: vgpuctl rm ID"
    key = found["v7"].key
    found.remove("v7")
    assert create(found, "again", sm_percent=1, overcommit=True).key == key


def test_a_mode_in_which_the_promises_cannot_be_kept_is_refused() -> None:
    found = registry()
    for n in range(4):
        create(found, f"v{n}", sm_percent=25)
    found.set_mode(Mode.SPATIAL)
    found.check()
    found.set_mode(Mode.TEMPORAL)
    found.change("v0", VgpuChanges.parse(sm_percent=20), 0)
    found.change("v1", VgpuChanges.parse(sm_percent=30), 0)
    before = list(found)
    found.set_mode(Mode.SPATIAL)  # 26 + 40 + 32 + 32 of 132 SMs
    found.set_mode(Mode.TEMPORAL)
    assert list(found) == before
    found.remove("v3")
    create(found, "wide", sm_percent=50, quota_request_percent=50)
    with pytest.raises(VgpuError, match=r"spatial mode .* need 1\.25 s of every second") as caught:
        found.set_mode(Mode.SPATIAL)
    assert caught.value.code is ErrorCode.NO_ROOM
    assert caught.value.hint == "make room first: vgpuctl set ID, or vgpuctl rm ID"
    assert found.mode is Mode.TEMPORAL
    found.check()


def test_a_group_has_one_vgpu_of_an_owner_on_a_gpu() -> None:
    found = registry()
    create(found, "a", sm_percent=30, group="train")
    with pytest.raises(VgpuError, match="a of group 'train' is on this GPU already") as caught:
        create(found, "b", sm_percent=30, group="train")
    assert caught.value.code is ErrorCode.NO_ROOM
    create(found, "c", sm_percent=30, group="other")
    found.create("d", VgpuSpec.parse(sm_percent=30, group="train"), Owner(ME.uid + 1), 0)
    with pytest.raises(VgpuError, match="a, c, d belong to groups") as caught:
        found.set_mode(Mode.SPATIAL)
    assert caught.value.code is ErrorCode.MODE
    found.check()


def test_oversubscribed_memory_need_not_fit_and_takes_nothing_from_the_others() -> None:
    found = registry(card=GpuCapacity(16 * GIB, 132))
    create(found, "a", sm_percent=30, memory_bytes="12G")
    for name in ("b", "c"):
        record = create(found, name, sm_percent=20, memory_bytes="40G", oversubscribe="managed")
        assert (record.memory_limit_bytes, record.guaranteed_memory_bytes) == (40 * GIB, 0)
    assert found.guaranteed_memory_bytes == 12 * GIB
    with pytest.raises(VgpuError, match="4 GiB of 16 GiB are left") as caught:
        create(found, "d", sm_percent=10, memory_bytes="5G")
    assert caught.value.code is ErrorCode.NO_ROOM
    found.occupied_bytes = 3 * GIB
    with pytest.raises(VgpuError, match="1 GiB of 16 GiB are left"):
        create(found, "d", sm_percent=10, memory_bytes="2G")
    create(found, "e", sm_percent=5, memory_bytes="90G", oversubscribe="managed")
    found.remove("e")
    with pytest.raises(VgpuError, match="b, c may own more memory than the card has") as caught:
        found.set_mode(Mode.SPATIAL)
    assert caught.value.code is ErrorCode.MODE
    found.check()
    with pytest.raises(VgpuError, match="spatial mode") as caught:
        create(registry(Mode.SPATIAL), "a", sm_percent=30, oversubscribe="managed")
    assert "leave out --oversubscribe" in caught.value.hint


def test_what_is_swapped_has_to_fit_the_card_alone() -> None:
    found = registry(card=GpuCapacity(16 * GIB, 132))
    create(found, "a", sm_percent=30, memory_bytes="12G")
    error = refused(ErrorCode.NO_ROOM, found, "b", sm_percent=20, memory_bytes="300G", oversubscribe="swap")
    assert str(error) == "300 GiB of memory asked for, the card has 16 GiB; the largest that fits: --mem 16384M"
    for name in ("b", "c"):
        create(found, name, sm_percent=20, memory_bytes="16G", oversubscribe="swap")
    found.suspend("b")
    for vgpu_id in ("b", "c"):
        with pytest.raises(VgpuError, match="the card has 16 GiB"):
            found.change(vgpu_id, VgpuChanges.parse(memory_bytes="17G"), 0)
    found.resume("b")
    assert found.guaranteed_memory_bytes == 12 * GIB


def test_a_group_needs_temporal_mode() -> None:
    with pytest.raises(VgpuError, match="spatial mode") as caught:
        create(registry(Mode.SPATIAL), "a", sm_percent=30, group="train")
    assert caught.value.code is ErrorCode.MODE
    assert "leave out --group" in caught.value.hint


def test_spatial_mode_needs_to_know_the_sms() -> None:
    found = registry(card=GpuCapacity(16 * GIB, 0))
    create(found, "a", sm_percent=30)
    with pytest.raises(VgpuError) as caught:
        found.set_mode(Mode.SPATIAL)
    assert caught.value.code is ErrorCode.MODE
    assert str(caught.value) == "this driver does not tell how many SMs the GPU has; use --mode temporal"


@pytest.mark.parametrize("mode", Mode)
def test_what_the_journal_remembers_is_restored_as_it_was(mode: Mode) -> None:
    found = registry(mode)
    create(found, "a", sm_percent=60, memory_bytes="100G", ttl_ns="1h")
    create(found, "b", sm_percent=30, overcommit=True)
    create(found, "c", sm_percent=20)
    create(found, "d", sm_percent=10)
    found.suspend("d")
    again = registry(mode)
    again.restore((r.vgpu_id, r.key, r.spec, r.owner, r.created_unix_ns, r.expires_unix_ns, r.suspended) for r in found)
    assert list(again) == list(found)
    again.set_mode(Mode.TEMPORAL)
    again.check()
    assert again["b"].share.guarantee_ppm == pytest.approx(200_000, abs=1)


def test_what_it_may_borrow_is_promised_to_nobody() -> None:
    found = registry(card=GpuCapacity(16 * GIB, 132))
    record = create(found, "a", sm_percent=30, memory_bytes="4G", memory_limit_bytes="14G")
    assert (record.memory_limit_bytes, record.guaranteed_memory_bytes, record.borrows) == (14 * GIB, 4 * GIB, True)
    assert not create(found, "b", sm_percent=30, memory_bytes="10G").borrows
    with pytest.raises(VgpuError, match="--mem-limit 2 GiB is less than --mem 4 GiB"):
        found.change("a", VgpuChanges.parse(memory_limit_bytes="2G"), 0)
    assert not found.change("a", VgpuChanges.parse(memory_limit_bytes="4G"), 0).borrows


def test_a_suspended_one_is_promised_nothing_until_there_is_room_again() -> None:
    found = registry(card=GpuCapacity(16 * GIB, 132))
    create(found, "a", sm_percent=60, memory_bytes="12G")
    refused(ErrorCode.NO_ROOM, found, "b", sm_percent=50, memory_bytes="1G")
    assert found.suspend("a").suspended
    assert (found.guaranteed_memory_bytes, found.guaranteed_ratio) == (0, 0)
    create(found, "b", sm_percent=50, memory_bytes="8G")
    found.change("a", VgpuChanges.parse(memory_bytes="10G"), 0)
    assert found["a"].suspended
    before = list(found)
    for owned, hint in (
        (8 * GIB, "the largest that fits: vgpuctl set a --sm 50 --mem 8192M, then vgpuctl resume a"),
        (8 * GIB + 1, "make room: vgpuctl rm ID"),  # it comes with more, whatever it is promised
    ):
        with pytest.raises(VgpuError) as caught:
            found.resume("a", owned)
        assert (caught.value.code, caught.value.hint) == (ErrorCode.NO_ROOM, hint)
        assert list(found) == before
    found.remove("b")
    assert not found.resume("a").suspended
    assert (found.guaranteed_memory_bytes, found.guaranteed_ratio) == (10 * GIB, 0.6)
    found.check()


def test_nobody_is_suspended_when_idle_under_mps() -> None:
    found = registry(Mode.SPATIAL)
    assert "under MPS" in refused(ErrorCode.MODE, found, "a", sm_percent=30, idle_suspend_ns="10m").message
    create(found, "a", sm_percent=30)
    with pytest.raises(VgpuError, match="under MPS"):
        found.change("a", VgpuChanges.parse(idle_suspend_ns="10m"), 0)
    found.change("a", VgpuChanges.parse(idle_suspend_ns="off"), 0)
    found.set_mode(Mode.TEMPORAL)
    assert found.change("a", VgpuChanges.parse(idle_suspend_ns="10m"), 0).spec.idle_suspend_ns == 600 * 10**9
    with pytest.raises(VgpuError, match="MPS does not allow"):
        found.set_mode(Mode.SPATIAL)
    found.change("a", VgpuChanges.parse(idle_suspend_ns="off"), 0)
    found.set_mode(Mode.SPATIAL)


class Promises(RuleBasedStateMachine):
    """Twin: a dictionary of (sm percent, memory, overcommit). Admission itself is proven in test_admission."""

    vgpus = Bundle("vgpus")

    @initialize(mode=st.sampled_from(Mode))
    def begin(self, mode: Mode) -> None:
        self.registry = registry(mode)
        self.twin: dict[str, tuple[int, int, bool]] = {}
        self.suspended: set[str] = set()
        self.count = 0

    @rule(target=vgpus, percent=st.integers(1, 100), gib=st.integers(1, 100), soft=st.booleans())
    def create(self, percent: int, gib: int, soft: bool) -> Any:
        self.count += 1
        vgpu_id = f"v{self.count}"
        wanted = self.twin | {vgpu_id: (percent, gib, soft)}
        try:
            self.registry.create(vgpu_id, VgpuSpec(sm_percent=percent, memory_bytes=gib * GIB, overcommit=soft), ME, 0)
        except VgpuError:
            assert not self.possible(wanted, asking=vgpu_id)
            return multiple()
        assert self.possible(wanted, asking=vgpu_id)
        self.twin = wanted
        return vgpu_id

    @rule(vgpu_id=vgpus, percent=st.integers(1, 100), gib=st.integers(1, 100))
    def change(self, vgpu_id: str, percent: int, gib: int) -> None:
        wanted = self.twin | {vgpu_id: (percent, gib, self.twin[vgpu_id][2])}
        try:
            self.registry.change(vgpu_id, VgpuChanges(sm_percent=percent, memory_bytes=gib * GIB), 0)
        except VgpuError:
            assert not self.possible(wanted, asking=vgpu_id)
            return
        assert self.possible(wanted, asking=vgpu_id)
        self.twin = wanted

    @rule(vgpu_id=vgpus)
    def suspend(self, vgpu_id: str) -> None:
        """It is promised nothing from now on: ``possible`` leaves it out."""
        self.registry.suspend(vgpu_id)
        self.suspended.add(vgpu_id)

    @rule(vgpu_id=vgpus)
    def resume(self, vgpu_id: str) -> None:
        """Admitted anew: refused where others were promised its place, and only there."""
        before = set(self.suspended)
        self.suspended.discard(vgpu_id)
        try:
            self.registry.resume(vgpu_id)
        except VgpuError:
            assert not self.possible(self.twin, asking=vgpu_id)
            self.suspended = before
            return
        assert self.possible(self.twin, asking=vgpu_id)

    @rule(vgpu_id=consumes(vgpus))
    def remove(self, vgpu_id: str) -> None:
        self.registry.remove(vgpu_id)
        self.suspended.discard(vgpu_id)
        del self.twin[vgpu_id]

    def possible(self, wanted: dict[str, tuple[int, int, bool]], asking: str) -> bool:
        if asking in self.suspended:
            return True
        wanted = {vgpu_id: one for vgpu_id, one in wanted.items() if vgpu_id not in self.suspended}
        if sum(gib for _, gib, _ in wanted.values()) > 140:
            return False
        if wanted[asking][2]:
            return True
        hard = [percent for percent, _, soft in wanted.values() if not soft]
        if self.registry.mode is Mode.TEMPORAL:
            return sum(hard) <= 100
        whole = Registry(H200, Mode.SPATIAL)
        shares = []
        for number, percent in enumerate(hard):
            lone = copy.copy(whole)
            lone._records = {}
            shares.append(lone.create(f"h{number}", VgpuSpec(sm_percent=percent, memory_bytes=GIB), ME, 0).share)
        return fits(Mode.SPATIAL, shares)

    @invariant()
    def books_are_right(self) -> None:
        self.registry.check()
        assert {
            r.vgpu_id: (r.spec.sm_percent, r.memory_limit_bytes // GIB, r.spec.overcommit) for r in self.registry
        } == self.twin
        assert {r.vgpu_id for r in self.registry if r.suspended} == self.suspended
        present = [one for vgpu_id, one in self.twin.items() if vgpu_id not in self.suspended]
        assert self.registry.guaranteed_memory_bytes == sum(gib for _, gib, _ in present) * GIB
        hard = sum(percent for percent, _, soft in present if not soft)
        soft_ppm = sum(r.share.guarantee_ppm for r in self.registry if r.spec.overcommit and not r.suspended)
        if self.registry.mode is Mode.TEMPORAL:
            # The floor of one millionth keeps everybody in the competition.
            assert soft_ppm <= (100 - hard) * 10_000 + sum(s for _, _, s in present)


TestPromises = Promises.TestCase


def test_one_from_another_gpu_is_admitted_like_a_new_one_and_stays_what_it_was() -> None:
    found = registry()
    found.create("here", VgpuSpec.parse(sm_percent=60, memory_bytes="80G", name="here"), ME, 1)
    spec, again = VgpuSpec.parse(sm_percent=60, memory_bytes="40G"), "vgpuctl migrate comes --gpu 1"
    for trial in (found.copy(), found):
        with pytest.raises(VgpuError) as refused:
            trial.adopt("comes", spec, ME, 5, 7, suspended=False, again=again)
        assert refused.value.code is ErrorCode.NO_ROOM
        assert refused.value.hint == f"the largest that fits: vgpuctl set comes --sm 40, then {again}"
        assert [record.vgpu_id for record in found] == ["here"]
    tried = found.copy()
    tried.adopt("comes", spec, ME, 5, 7, suspended=True, again=again)
    assert "comes" not in found
    record = found.adopt("comes", spec, ME, 5, 7, suspended=True, again=again)
    assert (record.created_unix_ns, record.expires_unix_ns, record.suspended, record.key) == (5, 7, True, 1)
    with pytest.raises(VgpuError) as refused:
        found.resume("comes")
    assert refused.value.code is ErrorCode.NO_ROOM
    found.check()
    found.remove("here")
    assert not found.resume("comes").suspended
    with pytest.raises(VgpuError) as refused:
        registry(Mode.SPATIAL).adopt("comes", spec, ME, 5, 7, suspended=False, again=again)
    assert refused.value.code is ErrorCode.MODE
