"""What an owner of a model, and a replica, do without a GPU: errors, bounds, an end at any moment."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.models import files
from vgpu.errors import ErrorCode, VgpuError
from vgpu.models import hashes, places
from vgpu.models.cuda import Card, Mapping
from vgpu.models.owner import MOST_REPLICAS, Owner, check_size, copied, serve
from vgpu.models.replica import asked, connected
from vgpu.models.safetensors import read_headers
from vgpu.models.table import Placed, Table, placed
from vgpu.protocol.stream import MessageStream


class RefusingCard:
    def copy_in(self, address: int, source: int, size: int) -> None:
        raise VgpuError(ErrorCode.UNAVAILABLE, "the CUDA driver refused")


def loaded(paths: list[Path], card: object) -> None:
    tensors = read_headers(paths)
    for path in paths:
        if path.name.startswith("gone"):
            path.unlink()
        if path.name.startswith("empty"):
            path.write_bytes(b"")
    list(copied(cast(Card, card), 0, tensors, placed(tensors, 1)[0], hashed=True))


def test_the_drivers_reason_is_the_error(tmp_path: Path) -> None:
    paths, _ = files.model(tmp_path)
    with pytest.raises(VgpuError, match="the CUDA driver refused"):
        loaded(list(paths), RefusingCard())


@pytest.mark.parametrize(("name", "says"), [("gone", "cannot read .*: No such file"), ("empty", "has become empty")])
def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path, name: str, says: str) -> None:
    paths, _ = files.model(tmp_path)
    changed = paths[0].rename(tmp_path / f"{name}.safetensors")
    with pytest.raises(VgpuError, match=says):
        loaded([changed], RefusingCard())


def test_a_place_whose_path_is_too_long_is_refused_before_the_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VGPU_ID", "vgpu-00000001")
    monkeypatch.setenv(places.FOLDER, str(tmp_path / ("x" * 100)))
    with pytest.raises(VgpuError, match="too long for a Unix socket"):
        serve("m", [tmp_path / "none"], print)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPU_ID", "vgpu-00000001")
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    (tmp_path / "m.lock").symlink_to("elsewhere")
    with pytest.raises(VgpuError, match="cannot serve the model m in") as refused:
        serve("m", [tmp_path / "none"], print)
    assert places.FOLDER in refused.value.hint


def table(tensors: int, letters: int) -> Table:
    rows = tuple(Placed(f"{number:0{letters}}", "U8", (1,), number, 1) for number in range(tensors))
    return Table("m", "vgpu-00000001", 1, "GPU-1", 1 << 30, read_only=True, tensors=rows)


def test_a_table_that_no_replica_would_take_is_refused_before_the_loading() -> None:
    check_size(table(20_000, 100))
    with pytest.raises(VgpuError, match="m has 40000 tensors") as refused:
        check_size(table(40_000, 1000))
    assert refused.value.code is ErrorCode.INVALID


def test_a_replica_beyond_the_most_gets_an_error() -> None:
    serving = Owner.__new__(Owner)
    serving.table, serving.changed = table(1, 1), []
    serving.replicas = {cast(MessageStream, number): number for number in range(MOST_REPLICAS)}
    near, far = socket.socketpair()

    async def scene() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving._serve, trio.socket.from_stdlib_socket(near))
            with pytest.raises(VgpuError, match="has 256 replicas, the most of one owner"):
                await trio.to_thread.run_sync(asked, far, {"op": "load"})
            far.close()

    trio.run(scene)


def test_an_owner_that_accepts_nothing_is_waited_for_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(places.FOLDER, str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "m.sock"))
        listener.listen(0)
        with closing(connected("m", 0)):  # it fills the queue
            with pytest.raises(VgpuError, match=r"accepted no connection within 0\.2 s") as refused:
                connected("m", 0.2)
            assert refused.value.code is ErrorCode.TIMEOUT


class Pieces:
    """A card that is asked to end at its first read."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.reads = 0

    def enter(self) -> None: ...

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        self.ends.set()
        return bytes(size)


def test_a_comparison_ends_with_the_piece_at_which_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "PIECE_BYTES", 10)
    monkeypatch.setattr(hashes, "_MOST_THREADS", 1)
    card, rows = Pieces(), [Placed(str(number), "U8", (95,), 0, 95, hashes.digest(bytes(95))) for number in range(5)]
    mapping: Any = type("Mapping", (), {"card": card, "address": 0})()
    assert hashes.changed(cast(Mapping, mapping), rows) == []
    assert card.reads == 5 * 10
    assert hashes.changed(cast(Mapping, mapping), [Placed("a", "U8", (95,), 0, 95, b"other")]) == ["a"]
    card.ends.clear()
    card.reads = 0
    assert hashes.changed(cast(Mapping, mapping), rows, card.ends.is_set) == []
    assert card.reads == 1
