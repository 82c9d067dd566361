"""Triggers and times as they are typed."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.options import words_of
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.triggers import awaited, canonical, in_order, moment_of, port_of, ports_of
from vgpu.spec import VgpuChanges, VgpuSpec, as_options

NOW = datetime(2027, 1, 31, 14, 30, 0)


@given(st.integers(1, 65535))
def test_every_port_is_a_trigger(port: int) -> None:
    assert canonical(f" TCP:{port} ") == f"tcp:{port}"
    assert port_of(f"tcp:{port}") == port


@given(st.text())
def test_what_is_a_trigger_is_canonical(text: str) -> None:
    with suppress(ValueError):
        said = canonical(text)
        assert canonical(said) == said


@pytest.mark.parametrize(
    "text",
    [
        *("", "calls", "tcp", "tcp:", "tcp:0", "tcp:65536", "tcp:-1", "udp:80", "8000", "tcp:٣"),
        *("tcp:0000080001", "tcp:080", "tcp:+80"),
    ],
)
def test_no_trigger(text: str) -> None:
    with pytest.raises(ValueError, match="is no trigger"):
        canonical(text)


def test_each_once_in_order() -> None:
    assert in_order(["tcp:9000", "tcp:80", "call", "tcp:80"]) == ("call", "tcp:80", "tcp:9000")
    assert ports_of(("call", "tcp:80")) == (80,)
    with pytest.raises(ValueError, match="17 triggers are more than 16"):
        in_order(f"tcp:{port}" for port in range(1, 18))


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("90m", NOW + timedelta(minutes=90)),
        ("15:00", datetime(2027, 1, 31, 15, 0)),
        ("14:30", datetime(2027, 2, 1, 14, 30)),
        ("08:30", datetime(2027, 2, 1, 8, 30)),
        ("08:30:05", datetime(2027, 2, 1, 8, 30, 5)),
        ("2027-02-03", datetime(2027, 2, 3)),
        ("2027-02-03T04:05", datetime(2027, 2, 3, 4, 5)),
    ],
)
def test_a_time(text: str, when: datetime) -> None:
    assert moment_of(text, NOW) == when.timestamp()


@pytest.mark.parametrize("text", ["", "soon", "25:00", "90", "2027-13-01", "0s", "2026-12-31", "1e99h"])
def test_no_time_or_one_that_is_past(text: str) -> None:
    with pytest.raises(VgpuError) as refused:
        moment_of(text, NOW)
    assert refused.value.code is ErrorCode.INVALID
    assert "--resume-at 90m" in refused.value.hint


@given(st.times())
def test_a_time_of_day_is_within_the_next_day(clock: object) -> None:
    assert NOW.timestamp() < moment_of(str(clock)[:8], NOW) <= (NOW + timedelta(days=1)).timestamp()


def test_for_people() -> None:
    at = NOW.timestamp()
    assert awaited((), None) == ""
    assert awaited(("call",), None) == "a CUDA call"
    assert awaited((), at) == "2027-01-31 14:30:00"
    assert awaited(("call", "tcp:80"), at) == "a CUDA call, a connection to port 80 or 2027-01-31 14:30:00"


def test_in_a_specification() -> None:
    spec = VgpuSpec.parse(sm_percent=30, idle_suspend_ns="10m", resume_on=["tcp:9000", " TCP:80"])
    assert spec.resume_on == ("tcp:80", "tcp:9000")
    assert VgpuSpec.model_validate_json(spec.model_dump_json()) == spec
    assert as_options({"resume_on": spec.resume_on}) == "--resume-on tcp:80 --resume-on tcp:9000"
    assert words_of({"resume_on": spec.resume_on}) == ["--resume-on", "tcp:80", "--resume-on", "tcp:9000"]
    assert words_of({"resume_on": "tcp:80"}) == ["--resume-on", "tcp:80"]
    assert VgpuChanges.parse(resume_on="off").applied_to(spec).resume_on == ()
    assert VgpuChanges.parse(idle_suspend_ns="off").applied_to(spec).resume_on == ()
    assert VgpuChanges.parse(idle_suspend_ns="5m").applied_to(spec).resume_on == spec.resume_on
    for wrong, says in (
        ({"resume_on": "tcp:80"}, "give --idle-suspend 10m, too"),
        ({"resume_on": "call", "idle_suspend_ns": "10m"}, "comes back with a CUDA call anyway"),
        ({"resume_on": ["off", "tcp:80"], "idle_suspend_ns": "10m"}, "leave out"),
        ({"resume_on": "80", "idle_suspend_ns": "10m"}, "is no trigger"),
        ({"resume_on": 80, "idle_suspend_ns": "10m"}, "--resume-on"),
    ):
        with pytest.raises(VgpuError, match=says):
            VgpuSpec.parse(sm_percent=30, **wrong)
