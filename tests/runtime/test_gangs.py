"""The links between GPU Servers: what one decides reaches the other, and whatever ends a link ends nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from gpuserver.core.admission.registry import GpuCapacity, Owner, Registry
from gpuserver.core.scheduler.leases import GangCalled, GangMemberStatus, VgpuIndex
from gpuserver.core.states.together import MemberResidence
from gpuserver.runtime.leases.gangs import GangLinks, gang_of
from gpuserver.runtime.leases.tokens import TokenLoop
from gpuserver.runtime.vgpus import Vgpu
from vgpu.paths import NodePaths
from vgpu.protocol.stream import MessageStream
from vgpu.share import Mode
from vgpu.spec import VgpuSpec

PATHS = NodePaths(Path("/nowhere"), Path("/nowhere"))
CARD = GpuCapacity(8 << 30, 132)


class Tokens:
    """A token loop that says what it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.said = GangMemberStatus()
        self.heard: list[GangCalled] = []
        self._publish: Callable[[], None] = lambda: None

    def on_decision(self, look: Callable[[], None]) -> None:
        self._publish = look

    def outlook(self, key: VgpuIndex) -> GangMemberStatus:
        return self.said

    def gang_window(self, event: GangCalled) -> None:
        self.heard.append(event)

    def decide(self, outlook: GangMemberStatus) -> None:
        self.said = outlook
        self._publish()


def vgpu(number: int = 1, uid: int = 7, **fields: Any) -> Vgpu:
    registry = Registry(CARD, Mode.TEMPORAL)
    spec = VgpuSpec.parse(sm_percent=30, **fields)
    record = registry.create(f"vgpu-0000000{number}", spec, Owner(uid), 0)
    return Vgpu(record, 1, cast(Any, None))


def server(gpu_index: int) -> tuple[Tokens, GangLinks]:
    tokens = Tokens()
    links = GangLinks(PATHS, gpu_index, cast(TokenLoop, tokens))
    links.enroll([vgpu(group="train")], Mode.TEMPORAL)
    return tokens, links


def link_pair() -> tuple[MessageStream, MessageStream]:
    one, other = trio.socket.socketpair()
    return MessageStream(one), MessageStream(other)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a list that grows
            await trio.sleep(0.001)


def test_which_gang_a_vgpu_is_in() -> None:
    ours, theirs = vgpu(group="train"), vgpu(uid=8, group="train")
    assert gang_of(ours, Mode.TEMPORAL) != gang_of(theirs, Mode.TEMPORAL)
    assert gang_of(ours, Mode.TEMPORAL) == gang_of(vgpu(2, group="train"), Mode.TEMPORAL)
    assert gang_of(ours, Mode.SPATIAL) is None
    plain = vgpu()
    assert gang_of(plain, Mode.TEMPORAL) is None
    plain.coattached = {5: ("vgpu-00000001", "vgpu-00000002"), 3: ("vgpu-00000001", "vgpu-00000009")}
    other = vgpu(2)
    other.coattached = {0: ("vgpu-00000001", "vgpu-00000002")}
    assert gang_of(plain, Mode.TEMPORAL) == gang_of(other, Mode.TEMPORAL) is not None
    ours.coattached = plain.coattached
    assert gang_of(ours, Mode.TEMPORAL) == gang_of(vgpu(group="train"), Mode.TEMPORAL)


async def _hears_and_is_free_again() -> None:
    (leader, low), (follower, high) = server(0), server(1)
    one, other = link_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(low.serve_link, one)
        nursery.start_soon(high.serve_link, other)
        leader.decide(GangMemberStatus(bound=True, start_ns=5, end_ns=9))
        await until(
            lambda: any(
                e.gang_window and (e.gang_window.start_ns, e.gang_window.end_ns) == (5, 9) for e in follower.heard
            )
        )
        follower.decide(GangMemberStatus(ready=False))
        await until(lambda: any(e.gang_window is not None and e.gang_window.binding for e in leader.heard))
        one.close()
        await until(lambda: follower.heard[-1].gang_window is not None and not follower.heard[-1].gang_window.binding)
    other.close()


def test_what_one_decides_the_other_hears_until_the_link_ends() -> None:
    trio.run(_hears_and_is_free_again)


def swapped(number: int = 1) -> Vgpu:
    return vgpu(number, group="train", oversubscribe="swap")


async def _where_memory_is_reaches_the_others() -> None:
    here, there = [GangLinks(PATHS, gpu, cast(TokenLoop, Tokens())) for gpu in (0, 1)]
    for links in (here, there):
        links.enroll([swapped()], Mode.TEMPORAL)
    key, state = swapped().record.key, MemberResidence(granted=True, wants=True, move_ns=5)
    one, other = link_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.serve_link, one)
        nursery.start_soon(there.serve_link, other)
        here.tell({key: state})
        await until(lambda: there.residents(key) == {0: state})
        quiesced = swapped()
        quiesced.quiesced = True
        here.enroll([quiesced], Mode.TEMPORAL)  # it has no leases, and its memory counts
        here.tell({key: replace(state, suspended=True)})
        await until(lambda: there.residents(key) == {0: replace(state, suspended=True)})
        assert here.residents(key) == {}  # the other has not said where its memory is
        here.enroll([], Mode.TEMPORAL)
        await until(lambda: there.residents(key) == {})
        nursery.cancel_scope.cancel()
    one.close()
    other.close()


def test_where_the_memory_of_a_swapped_member_is_reaches_the_others() -> None:
    trio.run(_where_memory_is_reaches_the_others)


async def _an_older_server_says_nothing_of_memory() -> None:
    tokens = Tokens()
    links = GangLinks(PATHS, 1, cast(TokenLoop, tokens))
    links.enroll([swapped()], Mode.TEMPORAL)
    one, other = link_pair()
    member = {"gang": "7/train", "bound": True, "start_ns": 5, "end_ns": 9, "late": False, "ready": True}
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, other:
            nursery.start_soon(links.serve_link, other)
            await one.send({"op": "outlooks", "gpu_index": 0, "members": [member]})
            await until(lambda: any(e.gang_window is not None and e.gang_window.binding for e in tokens.heard))
            assert links.residents(swapped().record.key) == {}
            nursery.cancel_scope.cancel()
    one.close()


def test_the_member_of_an_older_server_counts_as_not_swapped() -> None:
    trio.run(_an_older_server_says_nothing_of_memory)


async def _says(message: dict[str, Any]) -> list[GangCalled]:
    tokens, links = server(1)
    one, other = link_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, message)
            async with other:
                await links.serve_link(other)
    one.close()
    return tokens.heard


@pytest.mark.parametrize(
    "message",
    [{"op": "outlooks"}, {"op": "outlooks", "gpu_index": 1, "members": []}],
    ids=["no outlooks", "somebody who calls itself us"],
)
def test_nonsense_ends_the_link_and_nothing_else(message: dict[str, Any]) -> None:
    heard = trio.run(_says, message)
    assert all(event.gang_window is None or not event.gang_window.binding for event in heard)
