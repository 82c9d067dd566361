"""The pages, relay and dispatcher of one vGPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.relay.relay import Relay
from tests.native.stage import KEY, Listener, Stage, grants


@pytest.fixture
def stage() -> Iterator[Stage]:
    with (
        grants() as page,
        ActivityPage.create(generation=1) as activity,
        RelayPage.create() as relays,
        Dispatcher(relays) as dispatcher,
        Relay(activity, page, relays, KEY) as relay,
    ):
        dispatcher.add(KEY, page)
        yield Stage(page, activity, relays, dispatcher, relay, Listener(dispatcher))
