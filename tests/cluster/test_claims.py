"""Claims: the same claim has the same vGPU, whatever crashes between two requests."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Claim, check_allotted, differences
from vgpu.protocol.messages import Create, VgpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec

CLAIM = Claim("dra", "0b5e7c1e-pod-a", "team-a", {"pod": "train-0"})


def spec(sm: int = 20, memory: str = "2G", name: str | None = None) -> VgpuSpec:
    return VgpuSpec.parse(sm_percent=str(sm), memory_bytes=memory, name=name)


def asked(node: SimulatedNode, claim: Claim = CLAIM, sm: int = 20, gpu: str = "auto") -> VgpuStatus:
    with node.link() as link:
        return link.create(spec(sm), gpu, claim=claim, attach="mount")


def test_the_same_claim_has_the_same_vgpu(node: SimulatedNode) -> None:
    first = asked(node)
    assert (first.claim, first.attach) == (CLAIM, "mount")
    assert asked(node).vgpu_id == first.vgpu_id
    assert asked(node, Claim("dra", CLAIM.uid, "another text")).vgpu_id == first.vgpu_id
    assert asked(node, Claim("slurm", CLAIM.uid)).vgpu_id != first.vgpu_id
    with node.link() as link:
        assert len(link.list()) == 2


def test_the_labels_of_a_claim_are_those_of_its_last_request(node: SimulatedNode) -> None:
    first = asked(node, gpu="1")
    named = Claim("dra", CLAIM.uid, "team-a", {"pod": "train-1", "container": "main"})
    assert asked(node, named).claim == named
    os.kill(node.server_pid(1), signal.SIGKILL)
    node.server_pid(1)
    found = eventually(lambda: node.reading(first.vgpu_id), "the vGPU is listed")
    assert found.claim == named


def test_many_requests_at_once_have_one_vgpu(node: SimulatedNode) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: asked(node).vgpu_id, range(8)))
    assert len(set(made)) == 1
    with node.link() as link:
        assert [vgpu.vgpu_id for vgpu in link.list()] == [made[0]]


def test_a_claim_for_another_size_is_refused_and_nothing_changes(node: SimulatedNode) -> None:
    first = asked(node)
    with pytest.raises(VgpuError) as refused:
        asked(node, sm=30)
    assert refused.value.code is ErrorCode.EXISTS
    assert "sm_percent 30.0, not 20.0" in refused.value.message
    with node.link() as link:
        (only,) = link.list()
    assert (only.vgpu_id, only.spec.sm_percent) == (first.vgpu_id, 20)


def test_a_claim_outlives_the_gpu_server_and_the_node(node: SimulatedNode) -> None:
    first = asked(node, gpu="1")
    os.kill(node.server_pid(1), signal.SIGKILL)
    assert asked(node).vgpu_id == first.vgpu_id
    node.kill_node()
    node.start()
    again = eventually(lambda: [asked(node)], "the claim is found")[0]
    assert (again.vgpu_id, again.claim, again.gpu_index) == (first.vgpu_id, CLAIM, 1)


def test_a_claim_whose_vgpu_was_removed_has_a_new_one(node: SimulatedNode) -> None:
    first = asked(node)
    with node.link() as link:
        link.remove(first.vgpu_id, force=True)
    assert asked(node).vgpu_id != first.vgpu_id


def test_an_asker_that_leaves_takes_no_vgpu_of_another_asker(node: SimulatedNode) -> None:
    """The second request for a claim is never confirmed. The vGPU of the first one stays."""
    first = asked(node)
    with node.link() as link:
        assert link.create(spec(), claim=CLAIM, attach="mount", confirm=False).vgpu_id == first.vgpu_id
    assert asked(node).vgpu_id == first.vgpu_id


def test_an_older_node_refuses_a_claim() -> None:
    with pytest.raises(VgpuError, match="no claims"):
        Create(spec=spec(), claim=CLAIM).said_to(3)
    assert not {"claim", "attach"} & Create(spec=spec()).said_to(3).keys()


@pytest.mark.parametrize("uid", ["", "a" * 64, "../x", "a b", "-x"])
def test_a_claim_with_such_an_uid_is_refused(uid: str) -> None:
    with pytest.raises(ValueError, match="uid"):
        Create(spec=spec(), claim={"kind": "dra", "uid": uid})


@given(st.integers(1, 100), st.integers(1, 100), st.sampled_from([None, "a"]), st.sampled_from([None, "a", "b"]))
def test_differences_name_each_field_that_differs(sm: int, other_sm: int, name: str | None, other: str | None) -> None:
    found = differences(spec(sm, name=name), spec(other_sm, name=other))
    expected = {"sm_percent": (sm, other_sm)} if sm != other_sm else {}
    if name is not None and name != other:
        expected["name"] = (name, other)
    assert dict(found) == expected


def test_a_claim_asks_again_while_the_node_changes_its_size() -> None:
    asked = VgpuSpec.parse(sm_percent="20..60", memory_bytes="2G..4G")
    grown = asked.model_copy(update={"sm_percent": 35.0, "memory_bytes": 3 << 30})
    assert differences(asked, grown) == {}
    assert differences(asked, VgpuChanges(sm_percent=35).applied_to(asked)).keys() == {
        "sm_percent",
        "sm_range_percent",
    }


def test_bounds_stay_within_what_the_engine_gave() -> None:
    held = VgpuSpec.parse(sm_percent="30", memory_bytes="4G")
    dra, container = Claim("dra", "u"), Claim("container", "u")
    for sm, memory, allowed in (("10..30", None, True), ("10..31", None, False), (None, "2G..5G", False)):
        changes = VgpuChanges.parse(sm_percent=sm, memory_bytes=memory)
        check_allotted(container, held, changes)
        check_allotted(None, held, changes)
        if allowed:
            check_allotted(dra, held, changes)
            check_allotted(dra, changes.applied_to(held), changes)
        else:
            with pytest.raises(VgpuError, match="the claim dra/u has"):
                check_allotted(dra, held, changes)
