"""Which section of the quotas holds for a user."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.config import Config, Problem, parse
from vgpu.errors import ErrorCode, VgpuError
from vgpu.quotas.quota import Quotas, User

FILE = """
[quota]
sm_total = 100
vgpus = 4
idle_limit = "2h"
[quota.group.students]
sm_total = "50 %"
ttl = "8h"
[quota.group.staff]
sm_total = 300
idle_limit = "off"
[quota.user.ann]
mem = "16G"
[quota.claim.dra]
mem_total = "200G"
"""


def quotas(text: str = FILE) -> Quotas:
    found = parse(text)
    assert isinstance(found, Config), found
    return found.quota


def test_the_users_own_section_goes_before_the_groups_and_those_before_everyones() -> None:
    ann = quotas().of(User(1000, "ann", frozenset({"students"})))
    assert (ann.quota.memory_bytes, ann.sections["memory_bytes"]) == (16 << 30, "user ann")
    assert (ann.quota.sm_total_percent, ann.sections["sm_total_percent"]) == (50, "group students")
    assert (ann.quota.vgpus, ann.sections["vgpus"]) == (4, "everyone")


def test_of_several_groups_the_most_generous_value_holds() -> None:
    both = quotas().of(User(7, "bo", frozenset({"students", "staff"})))
    assert (both.quota.sm_total_percent, both.sections["sm_total_percent"]) == (300, "group staff")
    assert (both.quota.idle_limit_ns, both.sections["idle_limit_ns"]) == (0, "group staff")
    assert both.quota.ttl_ns == 8 * 3600 * 10**9


def test_root_and_the_nodes_user_have_only_a_section_of_their_own() -> None:
    assert quotas().of(User(0, "root", frozenset({"staff"}), is_exempt=True)).quota.is_empty
    named = quotas("[quota]\nvgpus = 1\n[quota.user.0]\nvgpus = 9\n").of(User(0, "root", is_exempt=True))
    assert named.quota.vgpus == 9


def test_a_user_without_a_name_has_a_section_by_uid() -> None:
    assert quotas("[quota.user.4000]\nvgpus = 1\n").of(User(4000)).quota.vgpus == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[quota]\nsm_totl = 3\n", "[quota] has no 'sm_totl'; did you mean 'sm_total'?"),
        ("[quota.user.ann]\nsm = 300\n", "quota.user.ann.sm"),
        ("[quota]\nvgpus = -1\n", "quota.vgpus: should be at least 0"),
        ("[quota]\nsm = 20\ndefault_sm = 30\n", "default_sm and sm: the first is more than the second"),
        ("[quota.claim.dra]\nidle_limit = '1h'\n", "claim.dra has no 'idle_limit'"),
        ("[quota.claim.pod]\nvgpus = 1\n", "quota.claim.pod"),
        ('[quota]\nidle_limit = "7"\n', "quota.idle_limit"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    found = parse(text)
    assert isinstance(found, list)
    assert any(isinstance(one, Problem) and complaint in one.message for one in found), found


@given(st.sampled_from([FILE, "", "[quota]\nvgpus = 0\n", "[quota.claim.ray]\nvgpus = 2\n"]))
def test_an_option_carries_the_same_quotas(text: str) -> None:
    found = quotas(text)
    again = Quotas.from_option(found.as_option())
    assert again.as_option() == found.as_option()
    for user in (User(1, "ann", frozenset({"staff"})), User(0, is_exempt=True), User(7)):
        assert again.of(user).quota.model_dump() == found.of(user).quota.model_dump()
    assert again.is_trivial == (text == "")


def test_a_node_without_quotas_has_no_option() -> None:
    assert quotas("").as_option() == "{}"


def test_an_option_that_is_none_names_the_key() -> None:
    with pytest.raises(VgpuError, match=r"quota\.vgpus") as refused:
        Quotas.from_option('{"vgpus": "many"}')
    assert refused.value.code is ErrorCode.INVALID
