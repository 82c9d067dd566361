"""Typical mistakes: each is answered with what to type next. And what success says on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ctl.fake_node import FakeNode, gpu_reading, vgpu_reading
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.ctl.present.listing import named
from vgpu.errors import ErrorCode, VgpuError

TRAINER = vgpu_reading(name="trainer")
OTHER = vgpu_reading(vgpu_id="vgpu-0b000001", name="infer")
GPU = gpu_reading(guaranteed_ratio=0.3, guaranteed_memory_bytes=41 << 30)

MISTAKES: list[tuple[str, Exit, list[str]]] = [
    ("create --sm", Exit.USAGE, ["create: option '--sm' requires an argument", "→ vgpuctl create --help"]),
    ("create", Exit.USAGE, ["how much compute is missing", "--sm 30"]),
    ("create --sm 0.3", Exit.USAGE, ["0.3 is less than 1 percent", "write 30"]),
    ("create --sm 101", Exit.USAGE, ["101 is not between 1 and 100 percent"]),
    ("create --sm -1", Exit.USAGE, ["'-1' is not a percentage", "write 30"]),
    ("create --sm 30 --mem 8Q", Exit.USAGE, ["'8Q' is not a size", "8GiB"]),
    ("create --sm 30 --foo 3", Exit.USAGE, ["no such option: --foo", "→ vgpuctl create --help"]),
    ("create --sm 30 --ttl soon", Exit.USAGE, ["--ttl", "8h"]),
    ("set x --gpu 1", Exit.USAGE, ["set does not move a vGPU", "→ vgpuctl migrate x --gpu 1"]),
    ("set x --gpu=1", Exit.USAGE, ["→ vgpuctl migrate x --gpu 1"]),
    ("set --gpu 1", Exit.USAGE, ["→ vgpuctl migrate VGPU --gpu 1"]),
    ("set x", Exit.USAGE, ["nothing to change", "→ vgpuctl set VGPU --sm 50 --mem 16G"]),
    ("gpu set 0 --period", Exit.USAGE, ["→ vgpuctl gpu set --help"]),
    ("migrate x", Exit.USAGE, ["missing option '--gpu'", "→ vgpuctl migrate --help"]),
    ("ls --filter", Exit.USAGE, ["ls: option '--filter' requires an argument", "→ vgpuctl ls --help"]),
    ("ls --filter idle", Exit.USAGE, ["'idle' is not KEY=VALUE", "→ vgpuctl ls --filter state=idle"]),
    ("ls --sort size", Exit.USAGE, ["--sort knows no 'size'", "memory"]),
    ("ls job-a", Exit.NOT_FOUND, ["there is no vGPU 'job-a'", "→ see: vgpuctl ls"]),
    ("ls vgpu-0", Exit.NOT_FOUND, ["'vgpu-0' fits 2 vGPUs", "→ write the id"]),
    ("rm", Exit.USAGE, ["missing argument 'VGPU'", "→ vgpuctl rm --help"]),
    ("run --sm 10", Exit.LAUNCH, ["which program? It is missing", "→ vgpuctl run ... python train.py"]),
    ("exec x", Exit.LAUNCH, ["which program? It is missing", "→ vgpuctl exec ... python train.py"]),
    ("kill x", Exit.USAGE, ["Did you mean vgpuctl rm -f?"]),
    ("new", Exit.USAGE, ["Did you mean vgpuctl create?"]),
    ("stats", Exit.USAGE, ["Did you mean vgpuctl top?"]),
    ("start", Exit.USAGE, ["Did you mean vgpuctl serve?"]),
    ("move x", Exit.USAGE, ["Did you mean vgpuctl migrate?"]),
    ("serve --simulate 99", Exit.USAGE, ["'--simulate'", "at most 16", "→ vgpuctl serve --help"]),
    ("serve --mode fast", Exit.USAGE, ["'--mode'", "temporal", "→ vgpuctl serve --help"]),
]


def dump(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json")
    return dumped


@pytest.fixture
def served(node: FakeNode) -> FakeNode:
    node.answers["list"] = lambda _: {"vgpus": [dump(TRAINER), dump(OTHER)]}
    node.answers["gpus"] = lambda _: {"gpus": [dump(GPU)]}
    for op in ("suspend", "resume", "migrate", "set", "remove"):
        node.answers[op] = lambda _: dump(TRAINER)
    return node


@pytest.mark.parametrize(("line", "code", "contained"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_what_to_type(
    served: FakeNode, capsys: pytest.CaptureFixture[str], line: str, code: Exit, contained: list[str]
) -> None:
    assert run(line.split()) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) <= 2
    assert [words for words in contained if words not in told.err] == []


@pytest.mark.parametrize(
    ("line", "simulated"),
    [("--simulate", "1"), ("--simulate --detach", "1"), ("--detach --simulate", "1"), ("--simulate 3", "3")],
)
def test_simulate_alone_means_one(line: str, simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def start(command: list[str], *_: object) -> None:
        given.append(command)
        raise VgpuError(ErrorCode.INTERNAL, "not in this test")

    monkeypatch.setattr("vgpu.ctl.node.os.execve", lambda _, command, environment: start(command))
    monkeypatch.setattr("vgpu.node.starting.start", start)
    assert run(["serve", *line.split()]) == Exit.FAILURE
    [command] = given
    assert command[command.index("--simulate") + 1] == simulated


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ("trainer", ["trainer"]),
        ("infer trainer", ["infer", "trainer"]),
        ("vgpu-0a", ["trainer"]),
        ("0b", ["infer"]),
        ("infer infer", ["infer"]),
        ("trainer infer --filter name=t*", ["trainer"]),
    ],
)
def test_ls_takes_names(served: FakeNode, capsys: pytest.CaptureFixture[str], names: str, listed: list[str]) -> None:
    assert run(["ls", "-o", "name", *names.split()]) == 0
    assert capsys.readouterr().out.split() == listed


def test_a_watched_vgpu_may_vanish() -> None:
    assert named(["trainer"], [OTHER]) == []


FREE = "GPU 0 has 70 % of its compute and 100 GiB free for other vGPUs."
SHOWN = "trainer (vgpu-0a1b2c3d)"
DONE = [
    ("suspend trainer", f"{SHOWN} is suspended. Its programs wait until vgpuctl resume."),
    ("resume trainer", f"{SHOWN} is back on GPU 0."),
    ("migrate trainer --gpu 0", f"{SHOWN} is on GPU 0 now."),
    ("set trainer --sm 30", f"{SHOWN} has 30 % of GPU 0 and 8 GiB."),
    ("rm trainer", f"{SHOWN} is removed."),
]


@pytest.mark.parametrize(("line", "sentence"), DONE)
def test_on_a_terminal_a_command_says_what_changed(
    served: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.setattr("vgpu.ctl.vgpus.sys.stdout.isatty", lambda: True)
    assert run(line.split()) == 0
    assert capsys.readouterr().out.splitlines() == [sentence, FREE]


@pytest.mark.parametrize(("named", "warned"), [("trainer", True), ("vgpu-9,vgpu-0a1b2c3d", True), ("infer", False)])
def test_a_shell_whose_vgpu_was_removed_is_told_the_way_out(
    served: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: str, warned: bool
) -> None:
    monkeypatch.setattr("vgpu.ctl.vgpus.sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("VGPU_ID", named)
    assert run(["rm", "trainer"]) == 0
    assert ('→ eval "$(vgpuctl deactivate)"' in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("line", "there", "sentence"),
    [
        ("ls", False, "No vGPU yet. vgpuctl run --sm 30 --mem 8G COMMAND makes one."),
        ("ls --filter state=suspended", True, "No vGPU fits."),
        ("ps", True, "No program runs in a vGPU."),
        ("ps trainer", True, "No program runs in this vGPU."),
    ],
)
def test_an_empty_list_is_a_sentence_on_a_terminal_and_a_header_in_a_pipe(
    served: FakeNode,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    there: bool,
    sentence: str,
) -> None:
    served.answers["list"] = lambda _: {"vgpus": [dump(TRAINER)] if there else []}
    served.answers["processes"] = lambda _: {"processes": []}
    assert run(line.split()) == 0
    assert "VGPU  NAME  GPU" in capsys.readouterr().out
    monkeypatch.setattr("vgpu.ctl.vgpus.sys.stdout.isatty", lambda: True)
    assert run(line.split()) == 0
    assert capsys.readouterr().out == f"{sentence}\n"


@pytest.mark.parametrize("missing", ["", "jupyter_client", "ipykernel", "anyio"])
def test_jupyter_install_names_what_the_kernel_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(
        "vgpu.ctl.integrations.jupyter.find_spec", lambda module: None if module == missing else object()
    )
    assert run(["jupyter", "install", "--sm", "20"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/kernels/vgpu\n"
    hints = {"": "", "jupyter_client": "jupyterlab", "ipykernel": "ipykernel", "anyio": '"st-vgpu[aio]"'}
    assert (f"→ pip install {hints[missing]}" in said.err) == bool(missing)
    assert len(said.err.splitlines()) == (2 if missing else 0)


@pytest.mark.parametrize("line", [line for line, _ in DONE])
def test_a_pipe_gets_the_row_or_the_id(served: FakeNode, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(line.split()) == 0
    told = capsys.readouterr().out
    assert "vgpu-0a1b2c3d" in told
    assert "free" not in told
    assert not [request for request in served.asked if request.op == "gpus"]
