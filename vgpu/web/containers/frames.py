"""The log of a container as its engine sends it, taken apart. Pure.

Without a terminal the engine sends frames: one byte for the stream, three zeros, the length in four bytes, and so many
bytes of output. With a terminal it sends the output alone.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from vgpu.protocol.codec import ProtocolError

Stream = Literal["stdout", "stderr"]
HEADER: Final = 8
STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stdout", "stderr")
"""By the first byte of a frame. 0 is the input of a terminal, echoed."""


class Output(NamedTuple):
    """A piece of a log. It may end within a line."""

    stream: Stream
    text: str


class Frames:
    """``feed`` it what arrives, however that is cut. ``terminal``: there are no frames."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._header = b""
        self._stream: Stream = "stdout"
        self._left = 0
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {stream: decoder("replace") for stream in set(STREAMS)}

    def feed(self, data: bytes) -> Iterator[Output]:
        """``ProtocolError``: it is no log."""
        if self._terminal:
            yield from self._decoded("stdout", data)
            return
        while data:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                yield from self._decoded(self._stream, part)
                continue
            wanted = HEADER - len(self._header)
            self._header, data = self._header + data[:wanted], data[wanted:]
            if len(self._header) == HEADER:
                self._begin(self._header)
                self._header = b""

    def _begin(self, header: bytes) -> None:
        if header[0] >= len(STREAMS) or header[1:4] != bytes(3):
            raise ProtocolError(f"{header!r} begins no frame of a log")
        self._stream = STREAMS[header[0]]
        self._left = int.from_bytes(header[4:], "big")

    def _decoded(self, stream: Stream, data: bytes) -> Iterator[Output]:
        if text := self._decoders[stream].decode(data):
            yield Output(stream, text)
