"""What is said to an end of an older release, and what is taken from one of a newer."""

from __future__ import annotations

import pytest

from tests.ctl.fake_node import vgpu_reading
from vgpu.enums import LeaseChoice, PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Claim
from vgpu.protocol.hello import Request
from vgpu.protocol.messages import Create, Forward, MigrateIn, Set, Suspend, VgpuList
from vgpu.protocol.versions import (
    PODS_SINCE,
    PROTOCOL_VERSION,
    QUEUE_SINCE,
    RANGES_SINCE,
    SLO_SINCE,
    TRIGGERS_SINCE,
)
from vgpu.queueing.preempted import Preempted
from vgpu.spec import VgpuChanges, VgpuSpec

OLDER = 2
SPEC = VgpuSpec(sm_percent=30, memory_bytes=2 << 30, lease=LeaseChoice.AUTO)
"""A creation carries what was said, and no defaults."""


def arrival(spec: VgpuSpec) -> MigrateIn:
    return MigrateIn(
        vgpu="vgpu-00c0ffee",
        spec=spec,
        owner_uid=0,
        share_gid=-1,
        created_unix_ns=1,
        expires_unix_ns=None,
        source=0,
        gpu_name="card",
        suspended=False,
        goes_on=True,
        home="",
        programs=(),
        generation=1,
        next_epoch=1,
        book=None,
    )


PLAIN: list[tuple[Request, str, set[str]]] = [
    (Create(spec=SPEC), "spec", {"request_id", "lifetime", "wait"}),
    (Set(vgpu="first", changes=VgpuChanges(sm_percent=40)), "changes", set()),
    (arrival(SPEC), "spec", {"origin", "preempted", "standby"}),
]


@pytest.mark.parametrize(("request_", "part", "newer"), PLAIN, ids=["create", "set", "arrive"])
def test_an_older_end_gets_the_fields_that_it_knows(request_: Request, part: str, newer: set[str]) -> None:
    now, before = request_.said_to(PROTOCOL_VERSION), request_.said_to(OLDER)
    assert now[part].keys() - before[part].keys() == {"lease"}
    assert now.keys() - before.keys() == newer
    assert all(before[field] == now[field] for field in before.keys() - {part})


def test_a_gpu_server_from_before_preemption_suspends_and_is_not_asked_to_preempt() -> None:
    assert Suspend(vgpu="first").said_to(QUEUE_SINCE - 1).keys() == {"op", "id", "vgpu"}
    mark = Preempted(1000, "r", PriorityName.HIGH, 5.0)
    preempting = Suspend(vgpu="first", preempted=mark)
    assert Suspend.model_validate(preempting.said_to(QUEUE_SINCE)) == preempting
    with pytest.raises(VgpuError) as refused:
        preempting.said_to(QUEUE_SINCE - 1)
    assert refused.value.code is ErrorCode.VERSION
    moved = arrival(SPEC).model_copy(update={"preempted": mark})
    assert "preempted" not in moved.said_to(QUEUE_SINCE - 1)


def test_a_request_that_is_passed_on_gets_older_too() -> None:
    told = Forward(uid=0, request=Create(spec=SPEC)).said_to(OLDER)
    assert told["request"] == Create(spec=SPEC).said_to(OLDER)


PACED = SPEC.model_copy(update={"slo": "tpot=30ms"})


@pytest.mark.parametrize(
    "request_",
    [Create(spec=PACED), Set(vgpu="first", changes=VgpuChanges.parse(slo="off")), arrival(PACED)],
    ids=["create", "set", "arrive"],
)
def test_latency_targets_are_not_sent_to_an_end_without_them(request_: Request) -> None:
    assert "slo" in str(request_.said_to(SLO_SINCE))
    with pytest.raises(VgpuError, match="has no --slo") as refused:
        request_.said_to(SLO_SINCE - 1)
    assert refused.value.code is ErrorCode.VERSION


EXCLUSIVE = SPEC.model_copy(update={"lease": LeaseChoice.EXCLUSIVE})
CHOOSY: list[Request] = [
    Create(spec=EXCLUSIVE),
    Set(vgpu="first", changes=VgpuChanges(lease=LeaseChoice.AUTO)),
    arrival(EXCLUSIVE),
]


@pytest.mark.parametrize("request_", CHOOSY, ids=["create", "set", "arrive"])
def test_what_an_older_end_cannot_do_is_refused_here(request_: Request) -> None:
    with pytest.raises(VgpuError) as refused:
        request_.said_to(OLDER)
    assert refused.value.code is ErrorCode.VERSION
    assert "has no --lease" in refused.value.message
    assert "vgpuctl stop" in refused.value.hint


def test_a_newer_node_may_say_more_of_a_specification() -> None:
    spec = SPEC.model_dump(mode="json") | {"of_a_later_release": 1}
    told = vgpu_reading().model_dump(mode="json") | {"spec": spec}
    [vgpu] = VgpuList.model_validate({"vgpus": [told]}).vgpus
    assert vgpu.spec == SPEC


def test_a_request_may_not() -> None:
    asked = Create(spec=SPEC).model_dump(mode="json")
    with pytest.raises(ValueError, match="of_a_later_release"):
        Create.model_validate(asked | {"spec": asked["spec"] | {"of_a_later_release": 1}})


def test_a_node_that_knows_no_pods_gets_none() -> None:
    """Its claims have no field ``pods``, and it refuses fields that it does not know."""
    named = Create(spec=SPEC, claim=Claim("dra", "u", pods=("p",)))
    assert named.said_to(PODS_SINCE)["claim"]["pods"] == ["p"]
    assert "pods" not in named.said_to(PODS_SINCE - 1)["claim"]
    assert "pods" not in Create(spec=SPEC, claim=Claim("dra", "u")).said_to(PROTOCOL_VERSION)["claim"]


def test_an_older_end_gets_no_triggers() -> None:
    plain, before = Suspend(vgpu="first"), TRIGGERS_SINCE - 1
    assert plain.said_to(before).keys() == {"op", "id", "vgpu", "preempted"}
    assert "standby" not in arrival(SPEC).said_to(before)
    waking = VgpuSpec.parse(sm_percent=30, memory_bytes="2G", idle_suspend_ns="1m", resume_on="tcp:8000")
    for request_ in (
        Suspend(vgpu="first", resume_on=("call",)),
        Suspend(vgpu="first", resume_at_unix_s=5.0),
        Create(spec=waking),
        Set(vgpu="first", changes=VgpuChanges.parse(resume_on="tcp:8000")),
        arrival(waking),
    ):
        assert type(request_).model_validate(request_.said_to(TRIGGERS_SINCE)) == request_
        with pytest.raises(VgpuError, match="no --resume-on") as refused:
            request_.said_to(before)
        assert refused.value.code is ErrorCode.VERSION
    assert "resume_on" not in SPEC.model_dump()


RANGED = VgpuSpec.parse(sm_percent="20..60", memory_bytes="2G..4G")
WITH_BOUNDS: list[Request] = [
    Create(spec=RANGED),
    Set(vgpu="first", changes=VgpuChanges.parse(sm_percent="20..60")),
    Set(vgpu="first", changes=VgpuChanges.parse(memory_bytes="2G..4G")),
    arrival(RANGED),
]


@pytest.mark.parametrize("request_", WITH_BOUNDS, ids=["create", "set sm", "set mem", "arrive"])
def test_an_older_end_gets_no_bounds(request_: Request) -> None:
    assert request_.said_to(RANGES_SINCE)
    with pytest.raises(VgpuError) as refused:
        request_.said_to(RANGES_SINCE - 1)
    assert refused.value.code is ErrorCode.VERSION
    assert "no bounds" in refused.value.message


def test_without_bounds_an_older_end_gets_what_it_knows() -> None:
    """It refuses fields that it does not know, and so do the journal and readings of an older release."""
    for request_, part, _ in PLAIN:
        assert not any("range" in name or name == "scaling" for name in request_.said_to(RANGES_SINCE - 1)[part])
        assert "resume_on" not in request_.said_to(TRIGGERS_SINCE - 1)[part]
    assert "scaling" not in Set(vgpu="first", changes=VgpuChanges(sm_percent=40)).said_to(PROTOCOL_VERSION)
    assert not any("range" in name for name in SPEC.model_dump())


def test_bounds_go_over_the_wire_and_back() -> None:
    for request_ in WITH_BOUNDS:
        assert type(request_).model_validate(request_.said_to(PROTOCOL_VERSION)) == request_
    assert VgpuSpec.model_validate_json(RANGED.model_dump_json(exclude_defaults=True)) == RANGED
