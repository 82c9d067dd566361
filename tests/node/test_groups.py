"""A slow name service holds nobody up."""

from __future__ import annotations

import grp
import threading

import pytest
import trio

from vgpu import groups
from vgpu.errors import ErrorCode, VgpuError
from vgpu.groups import Groups


def test_a_name_service_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(groups, "LOOKUP_S", 0.01)
    monkeypatch.setattr(grp, "getgrnam", lambda _: answer.wait(60))

    async def run() -> None:
        found = Groups()
        for _ in range(12):  # more than there are threads for
            with pytest.raises(VgpuError, match="did not find group 'staff' within") as refused:
                await found.id_of("staff")
            assert refused.value.code is ErrorCode.UNAVAILABLE
        answer.set()

    trio.run(run)


@pytest.mark.parametrize("name", ["no such group", "a\0b", "\ud800"])
def test_no_such_group(name: str) -> None:
    with pytest.raises(VgpuError, match="there is no group") as refused:
        trio.run(Groups().id_of, name)
    assert refused.value.code is ErrorCode.INVALID


def test_a_group() -> None:
    assert trio.run(Groups().id_of, "root") == 0
