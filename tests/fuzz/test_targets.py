"""The fuzzer's targets hold for what Hypothesis finds. ``python -m tests.fuzz`` goes deeper."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
OPS = st.sampled_from(["hello", "attach", "create", "set", "remove", "forward", "adopt", "watch", "register", "died"])


@pytest.mark.parametrize("name", TARGETS)
@given(st.binary(max_size=2000))
def test_a_target_holds_for_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@given(OPS, st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.integers(0, 255))
def test_the_wire_holds_for_frames_of_any_values(op: str, fields: dict[str, object], piece: int) -> None:
    body = msgpack.packb({**fields, "op": op})
    wire(bytes([piece]) + struct.pack("<I", len(body)) + body)
