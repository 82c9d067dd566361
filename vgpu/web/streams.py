"""Server-sent events for an open page, for as long as it reads. A slow page skips some; nothing waits for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import trio

from vgpu.web.feed import Feed
from vgpu.web.timelines import Timelines

BREATH_S: Final = 15.0
"""The server sends something at least so often. Otherwise it would not notice that the other end has gone."""
BREATH: Final = b": still here\n\n"
GATHER_S: Final = 0.2
"""A page is woken for several chunks at once: each time costs it as much as drawing a dozen leases."""


def sse(kind: str, data: bytes) -> bytes:
    """One message. ``data``: JSON, on one line."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


async def everything(feed: Feed) -> AsyncGenerator[bytes, None]:
    """*link* (``LinkState``), *snapshot* (``Snapshot``) and *event* (``EventReading``) messages, the latter beginning
    with those that are kept."""
    with feed.looking():
        link = snapshot = seen = 0
        while True:
            changed = feed.changed
            if link != feed.link_number:
                link = feed.link_number
                yield sse("link", feed.link.model_dump_json().encode())
            for number, event in [kept for kept in feed.events if kept[0] > seen]:
                seen = number
                yield sse("event", event.model_dump_json().encode())
            if snapshot != feed.snapshot_number:
                snapshot = feed.snapshot_number
                yield sse("snapshot", feed.encoded_snapshot())
            # Not across a yield: the end of the scope would cancel the task that sends what was yielded.
            with trio.move_on_after(BREATH_S) as silence:
                await changed.wait()
            if silence.cancelled_caught:
                yield BREATH


async def leases(timelines: Timelines, gpu: int) -> AsyncGenerator[bytes, None]:
    """*chunk* (``TraceChunk`` of leases and waits) and *failure* (``Failure``) messages of one GPU."""
    with timelines.looking(gpu) as timeline:
        seen = 0
        while True:
            changed = timeline.changed
            fresh = [kept for kept in timeline.chunks if kept[0] > seen]
            if fresh:
                seen = fresh[-1][0]
                yield b"".join(sse(kind, data) for _, kind, data in fresh)
                await trio.sleep(GATHER_S)
            with trio.move_on_after(BREATH_S) as silence:
                await changed.wait()
            if silence.cancelled_caught:
                yield BREATH
