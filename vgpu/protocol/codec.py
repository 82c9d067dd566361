"""Length-framed msgpack, sans I/O: bytes in, messages out. Nothing here trusts the other end.

A frame is a 4-byte little-endian length and that many bytes of one msgpack map with string keys. A decoder that has
raised stays broken. After a malformed frame the start of the next one is unknown, so the link is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgpack

from vgpu.errors import ErrorCode, VgpuError, cleaned

Message = dict[str, Any]

MAX_HOOK_BYTES: Final = 64 << 10
MAX_CONTROL_BYTES: Final = 1 << 20
"""The longest message that a server or a node takes from a peer."""
MAX_REQUEST_BYTES: Final = 64 << 10
"""The longest message that a node takes from a user. The longest valid request has a few thousand bytes."""
MAX_REQUEST_ITEMS: Final = 1024
"""The most items of each list and map in such a request, because unknown fields are checked one by one."""
MAX_ANSWER_BYTES: Final = 32 << 20
"""The longest answer. The vGPUs of a node with 512 of them take 0.8 MB, and a thousand programs as much again."""
_LENGTH: Final = struct.Struct("<I")


class ProtocolError(VgpuError):
    """The peer broke the rules of the link; this link ends, no other."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.PROTOCOL, message)


def encode(message: Message, max_bytes: int = MAX_CONTROL_BYTES) -> bytes:
    """One frame. ``ValueError`` if the message is larger than the other end will take (our own fault)."""
    body: bytes = msgpack.packb(message)
    if len(body) > max_bytes:
        raise ValueError(f"message of {len(body)} bytes exceeds the link's {max_bytes}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into messages.

    ``feed`` what arrived, then iterate: complete messages come out, the rest waits for more bytes. Memory is bounded by
    ``max_bytes`` plus one read: the length is checked before its body is collected. ``first_bytes``: of the first
    message, if that is to be shorter. ``max_items``: of each list and map; None: as many as fit.
    """

    def __init__(
        self, max_bytes: int = MAX_CONTROL_BYTES, *, first_bytes: int | None = None, max_items: int | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._next_bytes = max_bytes if first_bytes is None else min(first_bytes, max_bytes)
        self._most = {} if max_items is None else {"max_map_len": max_items, "max_array_len": max_items}
        self._buffer = bytearray()
        self._broken: ProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether part of a message is waiting for its rest: an end of stream here is a torn message."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[Message]:
        while (message := self.next()) is not None:
            yield message

    def next(self) -> Message | None:
        """The next complete message, or None; ``ProtocolError`` if what came is none."""
        if self._broken is not None:
            raise self._broken
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._next_bytes:
            first = "" if self._next_bytes == self._max_bytes else " at first"
            raise self._break(
                f"the peer announced a message of {length} bytes; this link takes {self._next_bytes}{first}"
            )
        if len(self._buffer) < _LENGTH.size + length:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        self._next_bytes = self._max_bytes
        return self._decoded(body)

    def _decoded(self, body: bytes) -> Message:
        try:
            message = msgpack.unpackb(body, strict_map_key=True, **self._most)
        except (ValueError, TypeError, RecursionError) as error:  # msgpack's own errors are ValueErrors
            raise self._break(f"the peer sent {len(body)} bytes that are not msgpack: {cleaned(str(error))}") from error
        if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
            raise self._break(f"the peer sent a msgpack {type(message).__name__} where a map with text keys belongs")
        return message

    def _break(self, reason: str) -> ProtocolError:
        self._broken = ProtocolError(reason)
        self._buffer.clear()
        return self._broken
