"""What fits a quota, and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.errors import ErrorCode, VgpuError
from vgpu.quotas.checks import Held, amount, check, over, with_defaults
from vgpu.quotas.quota import Quotas, User
from vgpu.spec import VgpuSpec

GIB = 1 << 30
CARD = 80 * GIB


def spec(**fields: Any) -> VgpuSpec:
    return VgpuSpec.parse(**({"sm_percent": 30, "memory_bytes": "8G"} | fields))


def refusal(wanted: VgpuSpec, held: Held = Held(), **quota: Any) -> str:  # noqa: B008
    allowance = Quotas.model_validate(quota).of(User(1000, "ann"))
    with pytest.raises(VgpuError) as refused:
        check(wanted, CARD, allowance, held, None)
    assert refused.value.code is ErrorCode.QUOTA
    assert "vgpuctl quota" in refused.value.hint
    return refused.value.message


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ({"sm": 20}, "the largest vGPU by the quota of everyone has 20 % of a GPU, and you ask for 30 %"),
        (
            {"mem": "4G"},
            "the largest vGPU by the quota of everyone has 4 GiB of memory, and you ask for 8 GiB",
        ),
        ({"ttl": "8h"}, "the longest time to live by the quota of everyone is 8h, and you ask for none"),
        ({"vgpus": 2}, "ann has 2 vGPUs of the 2 that the quota of everyone allows"),
        (
            {"sm_total": 100},
            "ann has 80 % of the 100 % of a GPU that the quota of everyone allows: 20 % are left, and this vGPU asks "
            "for 30 %",
        ),
        (
            {"mem_total": "20G"},
            "ann has 16 GiB of the 20 GiB of memory that the quota of everyone allows: 4 GiB are left, and this vGPU "
            "asks for 8 GiB",
        ),
    ],
)
def test_a_refusal_says_which_quota_whose_and_what_is_left(quota: dict[str, Any], text: str) -> None:
    assert refusal(spec(), Held(80, 16 * GIB, 2), **quota) == text


def test_a_claim_kind_counts_beside_the_user() -> None:
    quotas = Quotas.model_validate({"claim": {"dra": {"sm_total": 50}}})
    claims = quotas.of_claim("dra")
    assert claims is not None
    with pytest.raises(VgpuError, match="claims of kind dra together has 30 % of the 50 %"):
        check(spec(), CARD, quotas.of(User(5)), Held(), ("dra", claims, Held(30, 0, 1)))


def test_defaults_fill_only_what_the_request_leaves_open() -> None:
    quota = (
        Quotas.model_validate(
            {"default_mem": "2G", "ttl": "1h", "default_idle_suspend": "5m", "default_priority": "low"}
        )
        .of(User(1))
        .quota
    )
    filled = with_defaults(VgpuSpec.parse(sm_percent=10), quota)
    assert (filled.memory_bytes, filled.ttl_ns, filled.idle_suspend_ns, filled.priority) == (
        2 * GIB,
        3600 * 10**9,
        300 * 10**9,
        "low",
    )
    asked = spec(ttl_ns="10m", idle_suspend_ns="off", priority="high")
    assert with_defaults(asked, quota) == asked
    assert with_defaults(VgpuSpec.parse(fraction="1/4"), quota).memory_bytes is None


SHARES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=12)


@given(SHARES, st.integers(0, 300), st.integers(0, 200), st.integers(0, 6))
def test_what_is_admitted_one_after_the_other_never_exceeds_the_quota(
    asked: list[tuple[int, int]], share: int, memory: int, number: int
) -> None:
    quotas = Quotas.model_validate({"sm_total": share, "mem_total": f"{memory}G" if memory else 0, "vgpus": number})
    allowance = quotas.of(User(1))
    admitted = []
    for percent, gib in asked:
        wanted = spec(sm_percent=percent, memory_bytes=gib * GIB)
        held = Held.of(amount(one, CARD) for one in admitted)
        try:
            check(wanted, CARD, allowance, held, None)
        except VgpuError:
            # Refused only because one of the three would be exceeded.
            assert (
                held.promised_percent + percent > share
                or held.memory_bytes + gib * GIB > memory * GIB
                or len(admitted) >= number
            )
        else:
            admitted.append(wanted)
    held = Held.of(amount(one, CARD) for one in admitted)
    assert held.promised_percent <= share + 1e-3
    assert held.memory_bytes <= memory * GIB
    assert held.vgpus <= number
    rows = [(str(n), one, amount(one, CARD), CARD) for n, one in enumerate(admitted)]
    assert over(allowance.quota, rows) == []
