"""What the fuzzer drives: the wire format, and each page that a tenant or a peer may write.

Each target takes bytes and returns nothing. It raises only where the code under test breaks its contract: a decoder
may raise ``ProtocolError``, a validation ``ValidationError``, the mapping of a page ``PageError``. Another exception is
a finding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.page import PageError
from cython_ext.pages.relaypage import RelayPage
from cython_ext.pages.storepage import StorePage
from cython_ext.readings import SlotReading
from gpuserver.runtime.memory.outside import drift_by_pid
from gpuserver.runtime.memory.watch import contradicted, implicit_bounds, implicit_by_pid, standing
from gpuserver.runtime.vgpus import away_of, bounded
from vgpu.protocol.broker import FROM_BROKER, TO_BROKER, Attach
from vgpu.protocol.codec import MAX_HOOK_BYTES, Decoder, ProtocolError, encode
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import FORWARDS, REQUESTS, Notice

SENT: Final = tuple(
    TypeAdapter(kind) if isinstance(kind, type) else kind
    for kind in (REQUESTS, FORWARDS, FROM_BROKER, TO_BROKER, Hello, Attach, Notice)
)
MAX_RECORDS: Final = 1 << 12


def wire(data: bytes) -> None:
    """A stream of frames in pieces; each message that comes out is validated as every kind, and answered."""
    if not data:
        return
    piece, stream = data[0] + 1, data[1:]
    decoder = Decoder(MAX_HOOK_BYTES)
    try:
        for begin in range(0, len(stream), piece):
            decoder.feed(stream[begin : begin + piece])
            for message in decoder:
                validated(message)
    except ProtocolError:
        assert_broken(decoder)


def assert_broken(decoder: Decoder) -> None:
    """A decoder that has raised stays broken."""
    try:
        decoder.next()
    except ProtocolError:
        return
    raise AssertionError("a decoder went on after a malformed frame")


def message(data: bytes) -> None:
    """JSON instead of msgpack, so that the fuzzer reaches the models soon."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        validated(found)


def validated(found: dict[str, Any]) -> None:
    for kind in SENT:
        try:
            model = kind.validate_python(found)
        except ValidationError as error:
            str(error)
            continue
        assert isinstance(model, BaseModel)
        encode(model.model_dump(mode="json"))  # what was taken can be passed on


def scribbled(descriptor: int, data: bytes) -> None:
    """Two bytes say where, the rest is written there; each further piece of 64 bytes somewhere else."""
    size = os.fstat(descriptor).st_size
    for begin in range(0, len(data), 66):
        piece = data[begin : begin + 66]
        if len(piece) > 2:
            at = int.from_bytes(piece[:2], "little") * 8 % size
            os.pwrite(descriptor, piece[2 : 2 + size - at], at)


def activity(data: bytes) -> None:
    """An activity page with anything in it: all that servers and brokers read there, and compute from it."""
    with ActivityPage.create() as page:
        descriptor = os.dup(page.fileno())
    try:
        with ActivityPage.map(descriptor) as page:
            before = page.slots()
            os.pwrite(descriptor, data[:1], 0)  # seldom the header
            scribbled(descriptor, data[1:])
            read_activity(page, before)
        map_again(ActivityPage.map, descriptor)
    finally:
        os.close(descriptor)


def read_activity(page: ActivityPage, before: list[SlotReading]) -> None:
    after = page.slots()
    for value in (page.generation, page.broker_epoch, page.baton, page.returned_epoch, page.ledger_epoch, page.rung):
        assert 0 <= value < 1 << 64
    by_pid = {slot.pid: bounded(slot.charged_bytes) for slot in after}
    implicit_by_pid(after, by_pid)
    implicit_bounds(before, after, by_pid)
    contradicted(before, after, by_pid)
    drift_by_pid(before, after, by_pid)
    standing(before, after)
    for slot in after:
        assert away_of(slot) <= slot.committed_bytes[0]
        records, _, lost = page.traced(slot.index)
        assert len(records) <= MAX_RECORDS
        assert lost >= 0
    for index in range(64):
        page.read_slot(index)


def map_again(mapped: Callable[[int], Any], descriptor: int) -> None:
    try:
        mapped(descriptor).close()
    except PageError as error:
        str(error)


def grants(data: bytes) -> None:
    """A file that claims to be a grants page: brokers and hooks map what they are handed."""
    foreign(GrantsPage.map_readonly, data)


def relay(data: bytes) -> None:
    foreign(RelayPage.map, data)


def store(data: bytes) -> None:
    """A store page with anything in it: programs of its user may write whatever they like."""
    with StorePage.create(256) as page:
        scribbled(page.fileno(), data)
        assert 0 <= page.used <= page.blocks
        owners, _ = page.owners(0, page.blocks)
        page.give_back(owners)
        for pid, started in list(owners)[:4]:
            page.clear(pid, started)
        map_again(StorePage.map, page.fileno())


def foreign(mapped: Callable[[int], Any], data: bytes) -> None:
    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, int.from_bytes(data[:2], "little") * 16)
        os.pwrite(descriptor, data[2:], 0)
        map_again(mapped, descriptor)
    finally:
        os.close(descriptor)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (wire, message, activity, grants, relay, store)
}
