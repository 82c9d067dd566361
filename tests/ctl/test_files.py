"""What -o and --report do with what is there already."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from vgpu.ctl.main import run
from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import exclusive, replaced


def test_a_file_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("before")

    def fail() -> None:
        with replaced(target) as file:
            file.write(b"half")
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert target.read_text() == "before"
    with replaced(target):
        pass
    assert target.read_text() == "before"
    with replaced(target) as file:
        file.write(b"after")
    assert target.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.touch(mode=0o400)
    with pytest.raises(VgpuError, match="Permission denied"), replaced(target):
        pass


def test_a_link_stays_and_leads_to_what_is_written(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "there" / "out"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in (b"before", b"after"):
        with replaced(link) as file:
            file.write(text)
        assert link.is_symlink()
        assert target.read_bytes() == text
    assert list(target.parent.iterdir()) == [target]
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(VgpuError, match="symbolic links"), replaced(link):
        pass


def test_a_fifo_stays_and_hears_it_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(fifo.read_bytes()))
    reader.start()
    with replaced(fifo):  # as those do who want to know early: the reader must not see an end
        pass
    with replaced(fifo) as file:
        file.write(b"all of it")
    reader.join(10)
    assert heard == [b"all of it"]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_stays(tmp_path: Path) -> None:
    device = tmp_path / "full"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("devices cannot be made here")
    with pytest.raises(VgpuError, match="No space left"), replaced(device) as file:
        file.write(b"x")
    assert device.is_char_device()


@pytest.mark.parametrize("command", ["metrics", "support bundle --no-trace"])
def test_commands_write_through(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("VGPU_STATE_DIR", str(tmp_path / "state"))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(fifo)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(fifo.read_bytes()), daemon=True)
    reader.start()
    run([*command.split(), "-o", str(tmp_path / "link")])
    reader.join(10)
    assert heard[0]
    assert fifo.is_fifo()


def test_a_lock_is_for_nobody_else_to_open_whatever_the_umask_and_the_file_of_before(tmp_path: Path) -> None:
    path, refusal = tmp_path / "lock", VgpuError(ErrorCode.EXISTS, "taken")
    path.touch()
    path.chmod(0o644)
    before = os.umask(0)
    try:
        with exclusive(path, refusal):
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(VgpuError, match="taken"):
                exclusive(path, refusal)
        exclusive(path, refusal).close()
    finally:
        os.umask(before)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        exclusive(tmp_path / "link", refusal)
