"""What pages are told, without a node: snapshots skipped by who is slow, histories that stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from tests.ctl.fake_node import gpu_reading, vgpu_reading
from vgpu.errors import VgpuError
from vgpu.protocol.messages import EventReading, Snapshot
from vgpu.web.feed import MOST_EVENTS, MOST_VIEWERS, Feed
from vgpu.web.history import Samples
from vgpu.web.streams import everything


def snapshot(at_unix_s: float, **changes: object) -> Snapshot:
    return Snapshot(at_unix_s=at_unix_s, gpus=(gpu_reading(),), vgpus=(vgpu_reading(**changes),))


def told(message: bytes) -> tuple[str, dict[str, object]]:
    head, data, *_ = message.decode().split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_page_that_reads_slowly_gets_the_latest_snapshot_and_no_other() -> None:
    async def slow_reader() -> list[tuple[str, dict[str, object]]]:
        feed = Feed(Path("/nowhere"))
        feed._see(snapshot(1.0), "0.1")
        messages = everything(feed)
        heard = [told(await anext(messages)) for _ in range(2)]
        for at_unix_s in (2.0, 3.0, 4.0):
            feed._see(snapshot(at_unix_s), "0.1")
        heard.append(told(await anext(messages)))
        feed._hear(EventReading(at_unix_s=5.0, kind="created", gpu_index=0, text="made"))
        heard.append(told(await anext(messages)))
        await messages.aclose()
        assert feed._viewers == 0
        return heard

    kinds = [(kind, said.get("at_unix_s")) for kind, said in trio.run(slow_reader)]
    assert kinds == [("link", None), ("snapshot", 1.0), ("snapshot", 4.0), ("event", 5.0)]


def test_events_are_bounded_and_pages_too() -> None:
    async def check() -> None:
        feed = Feed(Path("/nowhere"))
        for i in range(3 * MOST_EVENTS):
            feed._hear(EventReading(at_unix_s=float(i), kind="created", gpu_index=0, text="made"))
        assert len(feed.events) == MOST_EVENTS
        feed._viewers = MOST_VIEWERS - 1
        feed.admit()
        with feed.looking(), pytest.raises(VgpuError, match="pages are open"):
            feed.admit()

    trio.run(check)


def test_a_node_that_is_not_there_is_said_once_with_what_to_type() -> None:
    async def check() -> None:
        feed = Feed(Path("/nowhere/control.sock"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            changed = feed.changed
            await changed.wait()
            assert not feed.link.connected
            assert "no process answers at /nowhere/control.sock" in feed.link.error
            assert "vgpuctl serve" in feed.link.hint
            number = feed.link_number
            with trio.move_on_after(0.7):  # it tries again meanwhile
                await trio.sleep_forever()
            assert feed.link_number == number
            nursery.cancel_scope.cancel()

    trio.run(check)


def test_a_history_is_of_who_is_there_now_and_knows_no_more_than_it_may() -> None:
    samples = Samples(most=3)
    assert samples.since(0.0).at_unix_s == ()
    for at_unix_s in (1.0, 2.0, 3.0):
        samples.add(snapshot(at_unix_s, vgpu_id="vgpu-00000001", tokens_per_second=at_unix_s))
    samples.add(snapshot(4.0, vgpu_id="vgpu-00000002", tokens_per_second=7.123456))
    history = samples.since(0.0)
    assert history.at_unix_s == (2.0, 3.0, 4.0)
    assert list(history.vgpus) == ["vgpu-00000002"]
    assert history.vgpus["vgpu-00000002"].tokens_per_second == (None, None, 7.12)
    assert history.gpus[0].held_ratio == (1.0, 1.0, 1.0)
    assert samples.since(3.5).at_unix_s == (4.0,)
