"""What may be asked of a vGPU, and what is refused with which reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import REQUESTS, Create
from vgpu.spec import VgpuChanges, VgpuSpec, as_options, checked_period, checked_window, explain
from vgpu.units import parse_slo

GIB = 1 << 30

specs = st.builds(
    VgpuSpec,
    sm_percent=st.floats(1, 100),
    memory_bytes=st.none() | st.integers(64 << 20, 1 << 40),
    fraction=st.none() | st.floats(0.01, 1),
    quota_limit_percent=st.floats(50, 100),
    quota_request_percent=st.none() | st.floats(1, 50),
    burst=st.booleans(),
    overcommit=st.booleans(),
    priority=st.sampled_from(PriorityName),
    name=st.none() | st.from_regex(r"[a-u][a-zA-Z0-9_.-]{0,20}", fullmatch=True),
    ttl_ns=st.none() | st.integers(1, 10**18),
)


def test_text_as_typed() -> None:
    spec = VgpuSpec.parse(sm_percent="30", memory_bytes="8G", ttl_ns="8h", priority="high", name=None)
    assert (spec.sm_percent, spec.memory_bytes, spec.ttl_ns) == (30.0, 8 * GIB, 8 * 3600 * 10**9)
    assert spec.compute_ratio == 0.3
    assert spec.quota_request_ratio == 1.0
    assert VgpuSpec.parse(sm_percent="30 %", fraction="25%").compute_ratio == 0.3


def test_the_bounds_themselves_are_allowed() -> None:
    for memory in (64 << 20, 1 << 50):
        assert VgpuSpec(sm_percent=30, memory_bytes=memory).memory_bytes == memory
    assert VgpuSpec(sm_percent=30, ttl_ns=1).ttl_ns == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "--sm 30"),
        ({"memory_bytes": "8G"}, "--sm 30"),
        ({"sm_percent": "0.3"}, "--sm: 0.3 is less than 1 percent"),
        ({"sm_percent": 0.3}, "write 30"),
        ({"sm_percent": float("nan")}, "--sm"),
        ({"sm_percent": "101"}, "between 1 and 100"),
        ({"sm_percent": 30, "memory_bytes": "8Q"}, "--mem: '8Q' is not a size"),
        ({"sm_percent": 30, "memory_bytes": "1M"}, "--mem: 1 MiB does not hold a CUDA context: the least is 64 MiB"),
        ({"sm_percent": 30, "memory_bytes": "8"}, "the least is 64 MiB; 8G is 8 GiB"),
        ({"sm_percent": 30, "memory_bytes": 1 << 60}, "more than any GPU"),
        ({"sm_percent": 30, "quota_request_percent": 50, "quota_limit_percent": 40}, "--quota-request 50 is more than"),
        ({"sm_percent": 30, "priority": "urgent"}, "--priority"),
        ({"sm_percent": 30, "name": "vgpu-1"}, "looks like a vGPU id"),
        ({"sm_percent": 30, "name": "-x"}, "not a name"),
        ({"sm_percent": 30, "name": "a" * 64}, "at most 63"),
        ({"sm_percent": 30, "ttl_ns": "10"}, "--ttl: '10' is not a duration"),
        ({"sm_percent": 30, "ttl_ns": "0s"}, "--ttl: 0 is no time"),
        ({"sm_percent": 30, "ttl_ns": -5}, "--ttl: -5ns is no time"),
        ({"sm_percent": 0, "name": "-"}, "percent; --name: '-' is not"),
        ({"fraction": "5/4"}, "--fraction"),
        ({"fraction": "1/1000"}, "less than 1 percent"),
        ({"sm_percent": 30, "turbo": True}, "turbo"),
    ],
)
def test_what_is_refused_and_why(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(VgpuError) as refused:
        VgpuSpec.parse(**fields)
    assert refused.value.code is ErrorCode.INVALID
    assert reason in refused.value.message
    assert "\n" not in refused.value.message


def test_a_refusal_to_the_letter() -> None:
    with pytest.raises(VgpuError, match=r"^how much compute is missing: give --sm 30 \(percent\), or --fraction 1/4$"):
        VgpuSpec.parse()


def test_a_fraction_means_compute_and_memory_and_gives_way_to_what_is_explicit() -> None:
    quarter = VgpuSpec.parse(fraction="1/4")
    assert (quarter.compute_ratio, quarter.memory_on(100 * GIB)) == (0.25, 25 * GIB)
    wider = VgpuSpec.parse(fraction="1/4", sm_percent=50)
    assert (wider.compute_ratio, wider.memory_on(100 * GIB)) == (0.5, 25 * GIB)
    larger = VgpuSpec.parse(fraction="1/4", memory_bytes="40G")
    assert (larger.compute_ratio, larger.memory_on(100 * GIB)) == (0.25, 40 * GIB)
    assert VgpuSpec.parse(sm_percent=30).memory_on(100 * GIB) == 30 * GIB
    assert isinstance(wider.memory_on(100 * GIB), int)


@given(st.integers(1, 64), st.integers(1 << 30, 1 << 40))
def test_n_times_one_nth_fits_every_card(n: int, total: int) -> None:
    assert n * VgpuSpec(fraction=1 / n).memory_on(total) <= total


@given(specs)
def test_a_specification_survives_wire_and_journal(spec: VgpuSpec) -> None:
    assert VgpuSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True)) == spec
    assert REQUESTS.validate_python(Create(spec=spec).model_dump(mode="json")) == Create(spec=spec)


@given(specs)
def test_no_changes_change_nothing(spec: VgpuSpec) -> None:
    assert VgpuChanges().applied_to(spec) == spec


def test_changes_replace_what_they_name_and_are_checked_together() -> None:
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="8G", quota_limit_percent=80)
    changed = VgpuChanges.parse(memory_bytes="16G", burst=True).applied_to(spec)
    assert (changed.sm_percent, changed.memory_bytes, changed.burst, changed.quota_limit_percent) == (
        30,
        16 * GIB,
        True,
        80,
    )
    with pytest.raises(VgpuError, match="--quota-request 90"):
        VgpuChanges.parse(quota_request_percent=90).applied_to(spec)
    with pytest.raises(VgpuError, match=r"^--mem: 1 MiB does not") as refused:
        VgpuChanges.parse(memory_bytes="1M")
    assert refused.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("text", "targets", "shown"),
    [
        ("tpot=30ms", (30, 0), "tpot=30ms"),
        (" TTFT = 0.5s , tpot=30ms", (30, 500), "tpot=30ms,ttft=500ms"),
        ("ttft=1h", (0, 3_600_000), "ttft=1h"),
        ("off", (0, 0), ""),
        ("", (0, 0), ""),
    ],
)
def test_latency_targets(text: str, targets: tuple[int, int], shown: str) -> None:
    spec = VgpuSpec.parse(sm_percent=30, slo=text)
    assert parse_slo(spec.slo) == (targets[0] * 10**6, targets[1] * 10**6)
    assert spec.slo == shown
    assert VgpuChanges.parse(sm_percent=40).applied_to(spec).slo == shown
    assert VgpuChanges.parse(slo="off").applied_to(spec).slo == ""
    assert ("slo" in spec.model_dump()) == bool(shown)  # an older node does not know the field


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("30ms", "names no target"),
        ("tpot=30", "is not a duration"),
        ("tpot=4999us", "is not between 5ms and 1h"),
        ("tpot=2h", "is not between"),
        ("tpot=30ms,tpot=40ms", "one twice"),
        ("p99=30ms", "write tpot=30ms, ttft=500ms, or tpot=30ms,ttft=500ms; or: off"),
        ("tpot=30ms|ttft=500ms", "is not a duration"),
    ],
)
def test_what_is_no_latency_target(text: str, reason: str) -> None:
    with pytest.raises(VgpuError, match=r"^--slo: ") as refused:
        VgpuSpec.parse(sm_percent=30, slo=text)
    assert reason in refused.value.message


def test_how_long_it_has_to_be_idle() -> None:
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="8G", idle_suspend_ns="10m")
    assert spec.idle_suspend_ns == 600 * 10**9
    assert VgpuSpec.parse(sm_percent=30, memory_bytes="8G").idle_suspend_ns == 0
    assert VgpuChanges.parse(sm_percent=40).applied_to(spec).idle_suspend_ns == 600 * 10**9
    assert VgpuChanges.parse(idle_suspend_ns=" OFF").applied_to(spec).idle_suspend_ns == 0
    with pytest.raises(VgpuError, match=r"^--idle-suspend: 999ms is less than 1s; or: off$"):
        VgpuChanges.parse(idle_suspend_ns="999ms")
    with pytest.raises(VgpuError, match="no program with managed memory"):
        VgpuSpec.parse(sm_percent=30, idle_suspend_ns="10m", oversubscribe="managed")


@pytest.mark.parametrize(
    ("period_ns", "fits"),
    [(4_999_999, False), (5_000_000, True), (1_000_000_000, True), (1_000_000_001, False)],
)
def test_a_round_of_turns_takes_between_5_ms_and_1_s(period_ns: int, fits: bool) -> None:
    if fits:
        assert checked_period(period_ns) == period_ns
    else:
        with pytest.raises(ValueError, match=r"is not between 5ms and 1s"):
            checked_period(period_ns)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory_limit_bytes": GIB}, "--mem-limit 1 GiB is less than --mem 2 GiB"),
        ({"memory_limit_bytes": 4 * GIB, "oversubscribe": "swap"}, "--mem-limit is for memory on the card"),
        ({"share_group": "lab", "oversubscribe": "swap"}, "--share-group would show what is swapped"),
        ({"process_memory_bytes": 3 * GIB}, "--mem-per-process 3 GiB is more than the 2 GiB of the vGPU"),
    ],
)
def test_memory_options_that_exclude_each_other(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        VgpuSpec(sm_percent=10, memory_bytes=2 * GIB, **fields)
    assert explain(refused.value).startswith(reason)
    assert VgpuSpec(sm_percent=10, memory_bytes=2 * GIB, memory_limit_bytes=4 * GIB, process_memory_bytes=3 * GIB)


def test_the_vgpus_of_a_group_may_be_swapped() -> None:
    spec = VgpuSpec(sm_percent=10, memory_bytes=2 * GIB, group="ranks", oversubscribe="swap")
    assert (spec.group, spec.oversubscribe) == ("ranks", "swap")


@pytest.mark.parametrize("group", ["", "a:b", "line\nbreak", "x" * 256])
def test_what_is_no_name_of_a_group(group: str) -> None:
    with pytest.raises(ValidationError, match="is not the name of a group"):
        VgpuSpec(sm_percent=10, share_group=group)
    assert VgpuSpec(sm_percent=10, share_group="DOMAIN\\domain users").share_group == "DOMAIN\\domain users"


@pytest.mark.parametrize(("window_ns", "fits"), [(249_999, False), (250_000, True), (10**8, True), (10**8 + 1, False)])
def test_between_a_quarter_of_a_millisecond_and_100_ms_is_in_flight(window_ns: int, fits: bool) -> None:
    if fits:
        assert checked_window(window_ns) == window_ns
    else:
        with pytest.raises(ValueError, match=r"is not between 250µs and 100ms"):
            checked_window(window_ns)


def test_options_as_they_are_typed() -> None:
    spec = VgpuSpec(sm_percent=12.5, memory_bytes=8 * GIB, burst=True, ttl_ns=3600 * 10**9, name="first", group="ranks")
    fields = spec.model_dump(mode="json", exclude_defaults=True)
    assert as_options(fields | {"no_field": 1}) == "--sm 12.5 --mem 8GiB --burst --ttl 1h --group ranks"


def test_values_that_mean_none_are_off_and_those_of_an_event_are_texts() -> None:
    fields = {"slo": "", "idle_suspend_ns": 0, "burst": False, "resume_on": "call, tcp:8000"}
    assert as_options(fields) == "--slo off --idle-suspend off --resume-on call --resume-on tcp:8000"


def test_only_the_first_complaints_are_told() -> None:
    """A request may have hundreds of fields that are wrong."""
    with pytest.raises(ValidationError) as refused:
        VgpuSpec.model_validate({f"field_{n}": n for n in range(100)})
    assert explain(refused.value).endswith("; and more")
    assert explain(refused.value).count(";") < 20


# --- two bounds


def test_bounds_are_read_and_the_lower_one_is_the_first_size() -> None:
    spec = VgpuSpec.parse(sm_percent="20..60", memory_bytes=" 8G .. 16G ")
    assert (spec.sm_percent, spec.sm_range_percent) == (20, (20, 60))
    assert (spec.memory_bytes, spec.memory_range_bytes) == (8 << 30, (8 << 30, 16 << 30))
    assert spec.scales
    assert as_options(spec.model_dump(exclude_defaults=True)) == "--sm 20..60 --mem 8G..16G"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"sm_percent": "60..20"}, "write the lower bound first, as in 20..60"),
        ({"sm_percent": "20..20"}, "write the lower bound first"),
        ({"sm_percent": "20.."}, "'' is not a percentage"),
        ({"sm_percent": "20..200"}, "200 is not between 1 and 100 percent"),
        ({"sm_percent": "20..60..70"}, "'60..70' is not a percentage"),
        ({"sm_percent": 30, "memory_bytes": "16G..8G"}, "write the lower bound first, as in 8G..16G"),
        ({"sm_percent": "20..60", "burst": True}, "--sm with two bounds and --burst exclude each other"),
        ({"sm_percent": "20..60", "overcommit": True}, "--overcommit exclude each other"),
        ({"sm_percent": "20..60", "quota_limit_percent": 50}, "--quota-limit exclude each other"),
        ({"sm_percent": "20..60", "quota_request_percent": 50}, "--quota-request exclude each other"),
        ({"sm_percent": "20..60", "memory_bytes": "1G", "memory_limit_bytes": "2G"}, "--mem-limit exclude"),
        ({"sm_percent": 30, "memory_bytes": "1G..2G", "oversubscribe": "swap"}, "--oversubscribe exclude"),
        ({"sm_percent": 70, "sm_range_percent": (20, 60)}, "the present size is not between them"),
        ({"fraction": "1/4", "sm_range_percent": (20, 60)}, "the present size is not between them"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(VgpuError) as refused:
        VgpuSpec.parse(**fields)
    assert complaint in refused.value.message


def test_a_size_by_hand_ends_its_bounds_and_no_others() -> None:
    spec = VgpuSpec.parse(sm_percent="20..60", memory_bytes="8G..16G")
    changed = VgpuChanges.parse(sm_percent="40").applied_to(spec)
    assert (changed.sm_percent, changed.sm_range_percent) == (40, None)
    assert changed.memory_range_bytes == spec.memory_range_bytes
    changed = VgpuChanges.parse(memory_bytes="12G").applied_to(spec)
    assert (changed.memory_bytes, changed.memory_range_bytes) == (12 << 30, None)
    assert VgpuChanges.parse(name="other").applied_to(spec).scales


def test_other_bounds_keep_the_size_or_move_it_between_them() -> None:
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="8G")
    for typed, now in (("20..60", 30), ("40..60", 40), ("10..20", 20)):
        assert VgpuChanges.parse(sm_percent=typed).applied_to(spec).sm_percent == now
    assert VgpuChanges.parse(sm_percent="20..60").applied_to(VgpuSpec.parse(fraction="1/4")).sm_percent == 25
    assert VgpuChanges.parse(memory_bytes="1G..4G").applied_to(spec).memory_bytes == 4 << 30


def test_compute_with_bounds_takes_no_memory_with_it() -> None:
    spec = VgpuSpec.parse(sm_percent="20..60")
    grown = VgpuChanges(sm_percent=50, sm_range_percent=(20, 60)).applied_to(spec)
    assert spec.memory_on(100 << 30) == grown.memory_on(100 << 30) == 20 << 30
