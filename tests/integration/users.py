"""Other users of a node that the tests run as root: a function under their uids, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.integration.node import SimulatedNode
from vgpu.protocol.codec import Decoder, Message, encode
from vgpu.protocol.hello import Hello

ALICE, BOB = 61001, 61002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


def opened(node: SimulatedNode) -> SimulatedNode:
    """Its sockets can be reached by other users."""
    node.directory.chmod(0o755)
    return node


def as_user(uid: int, act: Callable[[], Any], before: Callable[[], None] = lambda: None) -> Any:
    """What ``act`` returns, as JSON carries it. What it raises fails the test. ``before``: what root does first."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            before()
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            told: Mapping[str, Any] = {"result": act()}
        except BaseException:
            told = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    return answer["result"]


class RawLink:
    """A peer that says what it likes."""

    def __init__(self, node: SimulatedNode, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(node.paths.control_socket))
        self._decoder = Decoder(32 << 20)
        if hello:
            assert self.ask(Hello().model_dump(mode="json"))["ok"]

    def ask(self, message: Message) -> Message:
        self.socket.sendall(encode(message))
        return self.receive()

    def receive(self) -> Message:
        while (message := self._decoder.next()) is None:
            data = self.socket.recv(1 << 16)
            assert data, "the node closed the link"
            self._decoder.feed(data)
        return message

    def close(self) -> None:
        self.socket.close()
