"""The codec against arbitrary cuts and arbitrary garbage."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.errors import ErrorCode
from vgpu.protocol.codec import MAX_HOOK_BYTES, Decoder, ProtocolError, encode

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=10
)
messages = st.dictionaries(st.text(max_size=10), values, max_size=6)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(i % (len(data) + 1) for i in at)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 10_000)))
def test_messages_survive_every_way_of_cutting(sent: list[dict[str, Any]], at: list[int]) -> None:
    decoder, received = Decoder(), []
    for piece in cut(b"".join(map(encode, sent)), at):
        decoder.feed(piece)
        received += decoder
    assert received == sent
    assert not decoder.mid_frame


@given(st.lists(messages, min_size=1, max_size=3), st.integers(1, 50))
def test_what_is_not_complete_is_not_delivered(sent: list[dict[str, Any]], missing: int) -> None:
    stream = b"".join(map(encode, sent))
    decoder = Decoder()
    decoder.feed(stream[: max(0, len(stream) - missing)])
    received = list(decoder)
    assert received == sent[: len(received)]
    assert len(received) < len(sent)


@given(st.binary(max_size=200), st.lists(st.integers(0, 1000)))
def test_garbage_raises_or_waits_and_nothing_else(garbage: bytes, at: list[int]) -> None:
    decoder, broken = Decoder(max_bytes=100), None
    for piece in cut(garbage, at):
        decoder.feed(piece)
        try:
            for message in decoder:
                assert isinstance(message, dict)
                assert all(isinstance(key, str) for key in message)
        except ProtocolError as error:
            broken = broken or error
    if broken is not None:
        with pytest.raises(ProtocolError) as again:
            decoder.next()
        assert again.value is broken, "a broken decoder stays broken"


@given(st.integers(0, 2**32 - 1))
def test_the_length_is_judged_before_the_body_arrives(length: int) -> None:
    decoder = Decoder(max_bytes=1000)
    decoder.feed(struct.pack("<I", length))
    if length > 1000:
        with pytest.raises(ProtocolError, match=f"{length} bytes"):
            decoder.next()
    elif length:
        assert decoder.next() is None
    else:
        with pytest.raises(ProtocolError):
            decoder.next()


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb("op"),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": {1: 2}}),
        b"\x91" * 900,
        b"\x81\xa1",
        b"\x81\xa2\xff\xff\x01",
    ],
)
def test_frames_that_are_no_message(body: bytes) -> None:
    decoder = Decoder()
    decoder.feed(struct.pack("<I", len(body)) + body)
    with pytest.raises(ProtocolError, match="the peer") as refused:
        decoder.next()
    assert refused.value.code is ErrorCode.PROTOCOL


def test_a_message_that_is_no_map_is_called_what_it_is() -> None:
    decoder = Decoder()
    decoder.feed(b"\x02\x00\x00\x00" + msgpack.packb([1]))
    with pytest.raises(ProtocolError, match="a msgpack list where a map"):
        decoder.next()


def test_a_message_may_be_as_large_as_the_link_takes() -> None:
    message = {"a": "x" * 10}
    size = len(encode(message)) - 4
    assert encode(message, size) == encode(message)
    decoder = Decoder(max_bytes=size)
    decoder.feed(encode(message))
    assert decoder.next() == message
    with pytest.raises(ValueError, match=f"message of {size} bytes exceeds the link's {size - 1}"):
        encode(message, size - 1)


def test_a_message_too_large_for_the_link_is_our_own_fault() -> None:
    assert len(encode({"a": "x" * (MAX_HOOK_BYTES - 10)}, MAX_HOOK_BYTES)) <= MAX_HOOK_BYTES + 4
    with pytest.raises(ValueError, match="exceeds"):
        encode({"a": "x" * MAX_HOOK_BYTES}, MAX_HOOK_BYTES)
