"""What is said to an end of an older release, and what is taken from one of a newer."""

from __future__ import annotations

import pytest

from tests.ctl.fake_node import vgpu_reading
from vgpu.enums import LeaseChoice
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Claim
from vgpu.protocol.hello import Request
from vgpu.protocol.messages import Create, Forward, MigrateIn, Set, VgpuList
from vgpu.protocol.versions import PODS_SINCE, PROTOCOL_VERSION
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
    (arrival(SPEC), "spec", {"origin"}),
]


@pytest.mark.parametrize(("request_", "part", "newer"), PLAIN, ids=["create", "set", "arrive"])
def test_an_older_end_gets_the_fields_that_it_knows(request_: Request, part: str, newer: set[str]) -> None:
    now, before = request_.said_to(PROTOCOL_VERSION), request_.said_to(OLDER)
    assert now[part].keys() - before[part].keys() == {"lease"}
    assert now.keys() - before.keys() == newer
    assert all(before[field] == now[field] for field in before.keys() - {part})


def test_a_request_that_is_passed_on_gets_older_too() -> None:
    told = Forward(uid=0, request=Create(spec=SPEC)).said_to(OLDER)
    assert told["request"] == Create(spec=SPEC).said_to(OLDER)


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
