"""A link's two ends and the bytes between: sent in any order, cut anywhere, torn at any moment. Both ends' codecs."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing import bindings_wire as native
from tests.native.test_wire import messages
from vgpu.protocol.codec import MAX_HOOK_BYTES, Decoder, ProtocolError, encode


class Link(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(MAX_HOOK_BYTES)
        self.sent: list[dict[str, Any]] = []
        self.received: list[dict[str, Any]] = []
        self.on_the_wire = b""
        self.frames_due: list[int] = []  # bytes of each frame not received yet
        self.arrived = 0  # bytes of these
        self.broken = False

    def put(self, message: dict[str, Any], frame: bytes) -> None:
        self.sent.append(message)
        self.on_the_wire += frame
        self.frames_due.append(len(frame))

    @precondition(lambda self: not self.broken)
    @rule(message=messages)
    def python_sends(self, message: dict[str, Any]) -> None:
        self.put(message, encode(message, MAX_HOOK_BYTES))

    @precondition(lambda self: not self.broken)
    @rule(message=messages)
    def hook_sends(self, message: dict[str, Any]) -> None:
        frame = native.encode_frame(message)
        assert frame is not None
        assert frame == encode(message), "one encoding for both"
        self.put(message, frame)

    @precondition(lambda self: self.on_the_wire)
    @rule(count=st.integers(1, 400))
    def some_bytes_arrive(self, count: int) -> None:
        piece, self.on_the_wire = self.on_the_wire[:count], self.on_the_wire[count:]
        self.arrived += len(piece)
        self.decoder.feed(piece)
        for message in self.decoder:
            self.received.append(message)
            self.arrived -= self.frames_due.pop(0)

    @precondition(lambda self: not self.broken and not self.on_the_wire)
    @rule(
        garbage=st.sampled_from(
            [struct.pack("<I", MAX_HOOK_BYTES + 1), struct.pack("<I", 1) + b"\xc1", struct.pack("<I", 1) + b"\x90"]
        )
    )
    def garbage_arrives(self, garbage: bytes) -> None:
        """Behind whole messages; once seen, the link stays broken, whatever comes after it."""
        self.decoder.feed(garbage)
        with pytest.raises(ProtocolError):
            list(self.decoder)
        self.broken = True

    @precondition(lambda self: self.broken)
    @rule(message=messages)
    def nothing_comes_through_any_more(self, message: dict[str, Any]) -> None:
        self.decoder.feed(encode(message))
        with pytest.raises(ProtocolError):
            self.decoder.next()

    @invariant()
    def what_arrived_is_what_was_sent_in_order(self) -> None:
        assert self.received == self.sent[: len(self.received)]
        assert len(self.sent) - len(self.received) == len(self.frames_due)

    @invariant()
    def what_is_complete_was_delivered(self) -> None:
        if not self.broken:
            assert self.decoder.mid_frame == (self.arrived > 0)
            assert not self.frames_due or self.arrived < self.frames_due[0]


TestLink = Link.TestCase
