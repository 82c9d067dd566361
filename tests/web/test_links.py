"""Connections to an HTTP server of ours: whose they are, how many there may be, and that they end with their peer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import ROOT, eventually
from tests.integration.users import ALICE, as_user, needs_root
from vgpu.http.links import Room, encoded, source_of, uid_in
from vgpu.limits import Limits

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Its pid and port. It needs no node."""
    environment = os.environ | {"VGPU_RUNTIME_DIR": str(tmp_path_factory.mktemp("run")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vgpu.ctl", "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
        process.terminate()


def answered(port: int) -> socket.socket | None:
    """A connection that has had an answer; None: it was closed without one."""
    sock = socket.create_connection(("127.0.0.1", port), 60)
    try:
        sock.sendall(REQUEST)
        if sock.recv(1000):
            return sock
    except ConnectionError:
        pass
    sock.close()
    return None


def sockets_of(pid: int) -> int:
    def is_socket(path: Path) -> bool:
        try:
            return str(path.readlink()).startswith("socket:")
        except FileNotFoundError:
            return False

    return sum(map(is_socket, Path(f"/proc/{pid}/fd").iterdir()))


def test_a_connection_ends_with_its_peer(exporter: tuple[int, int]) -> None:
    pid, port = exporter
    before = sockets_of(pid)
    for ask in (True, False):
        for _ in range(10):
            sock = answered(port) if ask else socket.create_connection(("127.0.0.1", port))
            assert sock is not None
            sock.close()
    eventually(lambda: sockets_of(pid) <= before, "the connections' end", 60)


@needs_root
def test_one_user_has_some_connections_and_others_still_get_in(exporter: tuple[int, int]) -> None:
    _, port = exporter

    def many() -> int:
        return sum(sock is not None for sock in [answered(port) for _ in range(Limits().http_links_per_source + 8)])

    assert as_user(ALICE, many) == Limits().http_links_per_source
    for sock in [answered(port) for _ in range(40)]:
        assert sock is not None, "root has no bound per user"
        sock.close()


def test_a_peer_of_this_machine_is_its_user() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]):
                near, _ = listener.accept()
                with near:
                    assert source_of(near) == os.getuid()


def test_the_kernels_table() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:9C40 0100007F:1BA8 01 00000000:00000000 00:00000000 00000000  1007        0 77 1\n"
        "   torn\n"
    )
    if sys.byteorder == "little":
        assert encoded(("127.0.0.1", 40000)) == "0100007F:9C40"
        assert uid_in(table, ("127.0.0.1", 40000), ("127.0.0.1", 7080)) == 1007
    assert uid_in(table, ("127.0.0.1", 7080), ("127.0.0.1", 40000)) is None


def test_all_together_leave_some_to_root() -> None:
    room = Room(Limits(http_links=32, http_links_kept=8, http_links_per_source=10), frozenset({0}))
    assert [room.enter("10.0.0.1") for _ in range(11)] == [True] * 10 + [False]
    assert [room.enter(1000) for _ in range(11)] == [True] * 10 + [False]
    assert [room.enter(1001) for _ in range(5)] == [True] * 4 + [False]
    assert [room.enter(0) for _ in range(9)] == [True] * 8 + [False]
    room.leave(1000)
    assert not room.enter(1001)
    room.leave("10.0.0.1")
    assert room.enter(0)
