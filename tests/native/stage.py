"""What the native tests share: the pages of a little GPU, and polling with a bound where no event can be awaited."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import Event, EventKind, PageMode
from cython_ext.relay.relay import Relay
from cython_ext.testing.fake_peer import Process

MS = 1_000_000
PATIENCE_S = 60.0
KEY = 5


def grants(generation: int = 1, **changes: object) -> GrantsPage:
    arguments: dict[str, object] = {
        "vgpu_id": "vgpu-00c0ffee",
        "gpu_uuid": "GPU-1",
        "mode": PageMode.TEMPORAL,
        "generation": generation,
        "memory_limit_bytes": 8 * 2**30,
        "total_memory_bytes": 80 * 2**30,
    }
    return GrantsPage.create(**(arguments | changes))  # type: ignore[arg-type]


def eventually(condition: Callable[[], bool]) -> None:
    """For words that change without an event. Fails after ``PATIENCE_S``."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.0005)


def readable(descriptor: int) -> None:
    """Await an eventfd."""
    ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    assert ready, "waited in vain"


class Listener:
    """Collects a dispatcher's events and waits for particular ones."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.heard: list[Event] = []

    def wait(self, kind: EventKind, vgpu: int, epoch: int = 0) -> Event:
        """The first event not yet consumed that matches; what came before it stays for others."""
        while True:
            for event in self.heard:
                if (event.kind, event.vgpu, event.epoch) == (kind, vgpu, epoch):
                    self.heard.remove(event)
                    return event
            readable(self.dispatcher.fileno())
            self.heard += self.dispatcher.events()


@dataclass
class Stage:
    """One vGPU: its pages, its relay, and the dispatcher that hears it."""

    grants: GrantsPage
    activity: ActivityPage
    relays: RelayPage
    dispatcher: Dispatcher
    relay: Relay
    listener: Listener

    def process(self) -> tuple[Process, int]:
        """A process that lives inside this one, so nobody watches over its mutex."""
        slot = self.activity.reserve_slot(os.getpid(), 1)
        process = Process(self.activity, self.grants, slot)
        self.relay.watch(slot)
        process.pretend_active()
        return process, slot

    def lease(self, epoch: int, length_ns: int | None = None) -> None:
        now_ns = time.monotonic_ns()
        assert self.dispatcher.publish(KEY, epoch, now_ns, None if length_ns is None else now_ns + length_ns)
