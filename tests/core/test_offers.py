"""What a refusal offers: all of it is admitted, as it is typed."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.admission.registry import GpuCapacity
from tests.core.test_registry import GIB, ME, registry
from vgpu.errors import VgpuError
from vgpu.share import Mode
from vgpu.spec import VgpuChanges, VgpuSpec

OPTIONS = {
    "--sm": "sm_percent",
    "--mem": "memory_bytes",
    "--mem-per-process": "process_memory_bytes",
    "--quota-request": "quota_request_percent",
}
percents = st.one_of(st.integers(1, 100), st.floats(1, 100))
sizes = st.integers(64 << 20, 140 * GIB)


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    limit = draw(percents)
    fields = {
        "sm_percent": draw(percents),
        "memory_bytes": draw(st.none() | sizes),
        "process_memory_bytes": draw(st.none() | sizes),
        "quota_limit_percent": limit,
        "quota_request_percent": draw(st.none() | st.floats(1, limit)),
        "overcommit": draw(st.sampled_from([False, False, True])),
    }
    if fields["memory_bytes"] is not None and fields["process_memory_bytes"] is not None:
        fields["process_memory_bytes"] = min(fields["process_memory_bytes"], fields["memory_bytes"])
    if draw(st.booleans()):
        fields["fraction"] = fields["sm_percent"] / 100
        if draw(st.booleans()):
            fields["sm_percent"] = None
    return fields


def changes_of(options: str) -> dict[str, str]:
    words = options.split()
    return {OPTIONS[name]: value for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("mode", Mode)
@given(st.lists(asked(), min_size=2, max_size=12), st.sampled_from([132, 144, 7]))
def test_what_is_offered_is_admitted_as_it_is_typed(mode: Mode, all_asked: list[dict[str, Any]], sm_count: int) -> None:
    found = registry(mode, GpuCapacity(140 * GIB + 12345, sm_count))
    for n, fields in enumerate(all_asked):
        hint = ""
        try:
            found.create(f"v{n}", VgpuSpec.parse(**fields), ME, 0)
        except VgpuError as error:
            hint = error.hint
        _, _, offers = hint.partition("the largest that fits: ")
        for offer in offers.split(" or ") if offers else ():
            found.create("offered", VgpuSpec.parse(**(fields | changes_of(offer))), ME, 0)
            found.remove("offered")
    found.check()


@pytest.mark.parametrize("mode", Mode)
@given(st.lists(asked(), min_size=2, max_size=6), st.data())
def test_what_is_offered_for_one_that_was_suspended_can_be_typed(
    mode: Mode, all_asked: list[dict[str, Any]], data: st.DataObject
) -> None:
    found = registry(mode, GpuCapacity(140 * GIB, 132))
    found.create("v0", VgpuSpec.parse(**all_asked[0]), ME, 0)
    found.suspend("v0")
    for n, fields in enumerate(all_asked[1:], 1):
        with suppress(VgpuError):
            found.create(f"v{n}", VgpuSpec.parse(**fields), ME, 0)
    owned = data.draw(st.integers(0, found["v0"].promised_memory_bytes))
    hint = ""
    try:
        found.resume("v0", owned)
    except VgpuError as error:
        hint = error.hint
    for options in re.findall(r"vgpuctl set v0 (.+?), then vgpuctl resume v0", hint):
        trial = found.copy()
        trial.change("v0", VgpuChanges.parse(**changes_of(options)), 0)
        trial.occupied_bytes = max(0, owned - trial["v0"].promised_memory_bytes)
        trial.resume("v0", owned)
        trial.check()
