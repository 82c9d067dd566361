"""``import vgpu``: handles, programs in them, errors, and what stays after an end of any kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vgpu
from client_hook import driver
from tests.integration.node import ROOT, SimulatedNode, eventually

HEAVY = ("pydantic", "trio", "anyio", "typer", "rich", "structlog", "pynvml", "psutil", "IPython")
PRINT_ID = [sys.executable, "-c", "import os; print(os.environ['VGPU_ID'])"]
MEMORY = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
context, size = ctypes.c_void_p(), ctypes.c_size_t()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(size), 0) == 0
print(size.value)
"""


def python(node: SimulatedNode, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that uses the API; its output and errors are piped."""
    return node.popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def empty(node: SimulatedNode) -> None:
    eventually(lambda: not vgpu.list(), "the vGPU's end")


def test_import_loads_nothing_heavy(node: SimulatedNode) -> None:
    code = f"""
import sys, vgpu
assert not [name for name in sys.modules if name.startswith(("vgpu.", "client_hook"))]
vgpu.VgpuError, vgpu.ErrorCode, vgpu.Vgpu, vgpu.require, vgpu.connect
with vgpu.create(sm=5, mem="512M") as v:
    v.run([sys.executable, "-c", ""], check=True)
    v.resize(sm=6)
    assert v.stats().guarantee_ratio == 0.06, v.stats()
assert vgpu.list() == []
loaded = [name for name in {HEAVY} if name in sys.modules]
assert not loaded, loaded
"""
    done = python(node, code)
    out, err = done.communicate()
    assert done.returncode == 0, out + err


def test_names_and_unknown_ones() -> None:
    assert {"create", "connect", "list", "require", "VgpuSpec"} <= set(dir(vgpu))
    assert all(getattr(vgpu, name) is not None for name in vgpu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vgpu.nothing  # type: ignore[attr-defined]


def test_a_program_runs_in_it_and_it_goes_with_the_block(node: SimulatedNode) -> None:
    with vgpu.create(sm="10%", mem="1G", name="train") as v:
        assert v.name == "train"
        assert v.run(PRINT_ID, capture_output=True, text=True, check=True).stdout.strip() == v.id
        seen = v.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
        assert int(seen) == 1 << 30
        with v.popen(PRINT_ID, stdout=subprocess.PIPE, text=True) as program:
            assert program.communicate()[0].strip() == v.id
        assert v.environ({"PATH": "/bin"})["VGPU_ID"] == v.id
        assert [other.id for other in vgpu.list()] == [v.id]
        assert vgpu.connect("train").id == v.id
    assert vgpu.list() == []


def test_verbs(node: SimulatedNode) -> None:
    v = vgpu.create(sm=10, mem="1G", keep=True)
    v.resize(sm=20, mem="2G", name="other")
    assert (v.name, v.stats().memory_limit_bytes) == ("other", 2 << 30)
    v.suspend()
    assert v.stats().state == "suspended"
    v.resume()
    assert v.stats().state == "idle"
    with vgpu.connect(v.id) as same:
        assert same.stats().gpu_index == 0
    assert v.stats().state == "idle", "a block removes only what create made"
    v.remove()
    with pytest.raises(vgpu.VgpuError) as caught:
        v.stats()
    assert caught.value.code is vgpu.ErrorCode.NOT_FOUND


def test_a_spec_in_place_of_options(node: SimulatedNode) -> None:
    with vgpu.create(vgpu.VgpuSpec(sm_percent=7, memory_bytes=1 << 30)) as v:
        assert v.stats().guarantee_ratio == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"sm": 0.3}, "invalid", "for the fraction 0.3 of a GPU write 30"),
        ({}, "invalid", "how much compute is missing: give --sm 30"),
        ({"sm": 5, "mem": "8Q"}, "invalid", "--mem: '8Q' is not a size"),
        ({"sm": 5, "mem": "9000G"}, "no-room", ""),
        ({"sm": 5, "gpu": 7}, "not-found", ""),
        ({"sm": 5, "owner": "no such user"}, "invalid", "there is no user"),
    ],
)
def test_refusals_are_those_of_the_command_line(
    node: SimulatedNode, options: dict[str, object], code: str, text: str
) -> None:
    with pytest.raises(vgpu.VgpuError) as caught:
        vgpu.create(**options)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert text in str(caught.value)
    assert not str(caught.value).startswith("spec:")
    assert vgpu.list() == []


def test_an_unknown_option_is_an_error_of_the_caller(node: SimulatedNode) -> None:
    with pytest.raises(TypeError, match="has no option 'memory'"):
        vgpu.create(sm=5, memory="8G")  # type: ignore[call-arg]


def test_where_no_node_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(vgpu.VgpuError) as caught:
        vgpu.list()
    assert caught.value.code is vgpu.ErrorCode.UNREACHABLE
    assert caught.value.hint == f"start one with: {driver.command_for_a_node()}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after", ["import", "create"])
def test_a_killed_program_leaves_no_vgpu(node: SimulatedNode, number: signal.Signals, after: str) -> None:
    code = "import vgpu; vgpu.create; print('import', flush=True); v = vgpu.create(sm=5, mem='512M')"
    code += "; print('create', flush=True); __import__('time').sleep(600)"
    program = python(node, code)
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == after:
            break
    program.send_signal(number)
    program.communicate()
    empty(node)


def test_ctrl_c_anywhere_in_create_leaves_no_vgpu_in_a_program_that_goes_on(node: SimulatedNode) -> None:
    """The program interrupts itself after each message that it sends, or receives."""
    code = """
import sys, vgpu
from vgpu.api.link import Link
where, steps = int(sys.argv[1]), 0
def interrupted(method):
    def instead(*arguments):
        global steps
        result = method(*arguments)
        steps += 1
        if steps == where:
            raise KeyboardInterrupt
        return result
    return instead
vgpu.create
Link._send_message, Link._receive = interrupted(Link._send_message), interrupted(Link._receive)
try:
    vgpu.create(sm=5, mem="512M")
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.read()
"""
    for where in range(1, 7):  # hello, create, confirm: each is sent, and answered
        program = python(node, code, str(where))
        assert program.stdout is not None
        assert program.stdout.readline() == "interrupted\n"
        empty(node)
        assert program.poll() is None
        program.communicate()


def test_require_runs_the_program_in_a_vgpu(node: SimulatedNode, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, vgpu\n"
        "print('started', os.getpid(), *sys.argv[1:], flush=True)\n"
        "vgpu.require(sm=10, mem='1G')\n"
        "v, = vgpu.list()\n"
        "assert v.id == os.environ['VGPU_ID'] and 'libvgpu_hook' in open('/proc/self/maps').read()\n"
        "vgpu.require(sm=10)\n"
        "print('done', flush=True)\n"
        "sys.exit(7)\n"
    )
    program = node.popen([sys.executable, str(script), "a b"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    out, _ = program.communicate()
    assert out.splitlines() == [f"started {program.pid} a b"] * 2 + ["done"]
    assert program.returncode == 7
    empty(node)


def test_require_refuses_what_cannot_start_again(node: SimulatedNode) -> None:
    program = node.popen([sys.executable, "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = program.communicate("import vgpu; vgpu.require(sm=10)")
    assert "a program from standard input cannot start again in a vGPU" in err
    assert vgpu.list() == []


def test_a_program_without_the_hook_is_refused(node: SimulatedNode, tmp_path: Path) -> None:
    setuid = tmp_path / "setuid"
    setuid.write_bytes(Path("/bin/true").read_bytes())
    setuid.chmod(0o4755)
    if os.geteuid() == 0:
        os.chown(setuid, 65534, 65534)
        setuid.chmod(0o4755)
    with vgpu.create(sm=5, mem="512M") as v:
        if os.geteuid() == 0:
            with pytest.raises(vgpu.VgpuError) as caught:
                v.run([str(setuid)])
            assert caught.value.code is vgpu.ErrorCode.INVALID
        v.run("true", shell=True, check=True)


def test_the_repository_is_what_is_imported() -> None:
    assert Path(str(vgpu.__file__)).parent == ROOT / "vgpu"


def test_a_program_finds_the_vgpu_that_it_is_in(node: SimulatedNode) -> None:
    code = "import vgpu; v = vgpu.current(); print(v.id, v.stats().metrics()['vgpu/guarantee_ratio'])"
    with vgpu.create(sm=5, mem="512M") as v:
        done = v.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.split() == [v.id, "0.05"]
    assert vgpu.current() is None


def test_the_metrics_for_a_logger_are_numbers_by_name(node: SimulatedNode) -> None:
    with vgpu.create(sm=5, mem="512M") as v:
        metrics = v.stats().metrics()
        assert metrics["vgpu/memory_limit_bytes"] == 512 << 20
        assert {type(value) for value in metrics.values()} == {float}
        assert "vgpu/state" not in metrics


def test_the_notebooks_magic_shows_changes_and_explains(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vgpu.integrations import ipython

    assert "in no vGPU" in ipython.answer("")
    with vgpu.create(sm=5, mem="512M", name="book") as v:
        monkeypatch.setenv("VGPU_ID", v.id)
        assert f"{v.id} (book) on GPU 0: idle" in ipython.answer("")
        assert "9% promised" in ipython.answer("resize sm=9")
        assert ipython.answer("grow") == ipython.USAGE
        ipython._magic("resize speed=9")
        ipython._magic("resize sm=900")
    written = capsys.readouterr().out
    assert "no option 'speed'" in written
    assert "  → " in written or "vgpu: " in written
