"""Programs that load no hook are refused before they start: static, foreign, privileged, and scripts of such."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_hook.binary import Elf, Script, after_env, described
from client_hook.preloadable import found, why_not
from client_hook.sanitizers import sanitizers
from tests.ctl.fake_node import FakeNode
from vgpu.ctl.main import run

X86_64, AARCH64, I386 = 62, 183, 3
GLIBC = "/lib64/ld-linux-x86-64.so.2"
OWN = described(Path("/proc/self/exe").read_bytes())
assert isinstance(OWN, Elf)


def elf(loader: str = "", machine: int = X86_64, bits: int = 64, order: str = "<") -> bytes:
    """The least that the kernel takes for a program: a header, one program header, the loader's path."""
    path = loader.encode() + b"\0"
    ident = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    kind = 3 if loader else 1
    if bits == 64:
        head = ident + struct.pack(f"{order}HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        return head + struct.pack(f"{order}IIQQQQQQ", kind, 4, 120, 0, 0, len(path), len(path), 1) + path
    head = ident + struct.pack(f"{order}HHIIIIIHHHHHH", 3, machine, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    return head + struct.pack(f"{order}IIIIIIII", kind, 84, 0, 0, len(path), len(path), 4, 1) + path


def program(path: Path, content: bytes, mode: int = 0o755) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@given(st.binary() | st.binary().map(lambda rest: b"\x7fELF" + rest) | st.binary().map(lambda rest: b"#!" + rest))
def test_no_bytes_are_too_odd(data: bytes) -> None:
    described(data)


@given(st.data(), st.sampled_from([32, 64]), st.sampled_from("<>"))
def test_a_damaged_program_is_described_or_not(data: st.DataObject, bits: int, order: str) -> None:
    whole = bytearray(elf(GLIBC, bits=bits, order=order))
    for at, value in data.draw(st.lists(st.tuples(st.integers(4, len(whole) - 1), st.integers(0, 255)), max_size=6)):
        whole[at] = value
    described(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@given(st.sampled_from([32, 64]), st.sampled_from("<>"), st.integers(0, 0xFFFF))
def test_headers_say_machine_and_loader(bits: int, order: str, machine: int) -> None:
    assert described(elf(GLIBC, machine, bits, order)) == Elf(bits, machine, GLIBC)
    assert described(elf("", machine, bits, order)) == Elf(bits, machine, "")


@given(st.lists(st.text(max_size=8), max_size=6))
def test_env_never_gets_stuck(words: list[str]) -> None:
    assert len(after_env(words)) <= len(" ".join(words)) + 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["python", "-c", "1"], ["python", "-c", "1"]),
        (["-i", "A=1", "-u", "B", "-C", "/", "--", "x"], ["x"]),
        (["-S", "python3 -u", "file"], ["python3", "-u", "file"]),
        (["-Spython3 -u", "file"], ["python3", "-u", "file"]),
        (["-S python3 -u", "file"], ["python3", "-u", "file"]),
        (["--split-string=python3", "file"], ["python3", "file"]),
        ([], []),
        (["-u"], []),
    ],
)
def test_what_env_starts(words: list[str], left: list[str]) -> None:
    assert after_env(words) == left


def test_the_line_of_a_script() -> None:
    assert described(b"#! /bin/sh  -e x \necho") == Script("/bin/sh", "-e x")
    assert described(b"#!/bin/sh") == Script("/bin/sh", "")
    assert described(b"#!\n") is None


def why(*argv: str, path: str = "/usr/bin:/bin", system_hook: bool = False) -> str:
    return why_not(argv, {"PATH": path}, system_hook=system_hook)


def test_what_loads_the_hook_is_not_refused(tmp_path: Path) -> None:
    script = program(tmp_path / "script", b"#!/usr/bin/env -S sh -e\ntrue\n")
    empty = program(tmp_path / "empty", b"")
    for argv in (["sh"], ["/bin/sh", "-c", "x"], [str(script)], ["env", "A=1", "sh"], [OWN.loader, "/bin/true"]):
        assert why(*argv) == ""
    assert why("no-such-program") == why(str(tmp_path)) == why("") == why(str(empty)) == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (elf(""), "is statically linked and loads no other library"),
        (elf("/lib/ld-musl-x86_64.so.1"), "is started by /lib/ld-musl-x86_64.so.1, which is not the loader of glibc"),
        (elf("/lib/ld-linux-aarch64.so.1", AARCH64), "is built for aarch64, and the hook for x86-64"),
        (elf("/lib/ld-linux.so.2", I386, 32), "is built for i386, and the hook for x86-64"),
        (elf("", I386, 32), "is built for i386, and the hook for x86-64"),
    ],
)
@pytest.mark.skipif(OWN.machine != X86_64, reason="made for x86-64")
def test_what_does_not_load_it_is(tmp_path: Path, content: bytes, reason: str) -> None:
    tool = program(tmp_path / "tool", content)
    script = program(tmp_path / "script", f"#!{tool} -x\n".encode())
    second = program(tmp_path / "second", f"#!{script}\n".encode())
    third = program(tmp_path / "third", b"#!/usr/bin/env tool\n")
    path = f"{tmp_path}:/usr/bin:/bin"
    assert why(str(tool)) == f"{tool} {reason}"
    assert why("tool", path=path) == f"tool {reason}"
    assert why("env", "A=1", "tool", path=path) == f"env starts tool, which {reason}"
    assert why(str(script)) == f"{script} is a script, and its interpreter {tool} {reason}"
    assert why(str(second)).endswith(f"{tool} {reason}")
    assert why(str(third), path=path) == f"{third} is a script, and its interpreter env starts tool, which {reason}"
    assert why("tool", path=path, system_hook=True) == f"tool {reason}"


def test_a_program_is_looked_for_as_execvp_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, mode in (("a", 0o644), ("b", 0o755), ("c", 0o755)):
        (tmp_path / folder).mkdir()
        program(tmp_path / folder / "it", b"", mode)
    (tmp_path / "a" / "dir").mkdir()
    path = ":".join(str(tmp_path / folder) for folder in "abc")
    assert found("it", {"PATH": path}) == tmp_path / "b" / "it"
    monkeypatch.chdir(tmp_path / "c")
    assert found("it", {"PATH": f":{path}"}) == Path("it")
    assert found("dir", {"PATH": path}) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a program of another user setuid")
def test_privileged_programs_are_refused_unless_the_system_has_the_hook(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    shutil.copy("/bin/true", tool)
    os.chown(tool, 65534, -1)
    tool.chmod(0o4755)
    if os.statvfs(tool).f_flag & os.ST_NOSUID:
        pytest.skip("the directory for temporary files is mounted nosuid")
    assert why(str(tool)).startswith(f"{tool} is setuid (it runs as uid 65534)")
    assert why(str(tool), system_hook=True) == ""
    os.chown(tool, 0, 65534)
    tool.chmod(0o2755)
    assert why(str(tool)).startswith(f"{tool} is setgid (it runs as gid 65534)")
    tool.chmod(0o755)
    os.setxattr(tool, "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))
    assert why(str(tool)) == ""  # root has them anyhow
    for part in (tmp_path, *tmp_path.parents):
        if part.name.startswith(("pytest-", "test_", "popen-")):
            part.chmod(0o755)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(65534)
            os.write(writing, why(str(tool)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read().startswith(f"{tool} has file capabilities")


def test_run_and_exec_refuse_before_anything_is_made(
    node: FakeNode, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = program(tmp_path / "tool", elf("", OWN.machine, OWN.bits))
    for begin in (["run", "--sm", "30", "--mem", "1G"], ["exec", "vgpu-0a1b2c3d"]):
        assert run([*begin, "--", str(tool)]) == 125
        said = capfd.readouterr().err.splitlines()
        assert said[0] == (
            f"vgpuctl: {tool} is statically linked and loads no other library, "
            "so it would use the GPU outside of its vGPU"
        )
        assert said[1].endswith(f"vgpuctl {begin[0]} --allow-unhooked")
    assert node.asked == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_real_programs(tmp_path: Path) -> None:
    source = tmp_path / "x.c"
    source.write_text("int main(void) { return 0; }")
    for options, refused in (["-static"], True), (["-static-pie"], True), (["-no-pie"], False), ([], False):
        tool = tmp_path / f"tool{''.join(options)}"
        done = subprocess.run(["gcc", *options, "-o", tool, source], capture_output=True, check=False)
        if done.returncode == 0:
            assert bool(why(str(tool))) == refused, options


def test_a_fifo_is_left_to_what_starts_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o755)
    assert why(str(tmp_path / "fifo")) == ""
    assert sanitizers(tmp_path / "fifo") == []


@pytest.mark.parametrize("command", [["run", "--mem", "1G"], ["exec", "mine"], ["exec", "--allow-unhooked", "mine"]])
def test_a_program_without_a_name_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--", ""]) == 125
    assert "the program's name is empty" in capsys.readouterr().err
