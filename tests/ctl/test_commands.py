"""vgpuctl against a node whose answers are known: what is asked, what is printed, what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client_hook import driver
from tests.ctl.fake_node import FakeNode, gpu_reading, node_status, process_reading, vgpu_reading
from vgpu.ctl.exit_codes import FOR_ERROR, Exit
from vgpu.ctl.main import run
from vgpu.ctl.present.tables import used_of
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.starting import did_not_start
from vgpu.protocol.messages import Create, Remove, Set, SetGpu
from vgpu.protocol.tenancy import GetQuota
from vgpu.share import MEANING
from vgpu.spec import VgpuSpec
from vgpu.units import GIB, MIB

ROOT = Path(__file__).parents[2]
HOOK = Path("/opt/vgpu/libvgpu_hook.so")


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about the native library, nor about what preloads it on this machine."""
    monkeypatch.setattr("client_hook.environment.hook_to_preload", lambda: HOOK)
    for name in ("VGPU_ID", "LD_PRELOAD", "VGPU_SIM_DIR", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def dump(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json")
    return dumped


def refuse(code: ErrorCode, message: str = "no", hint: str = "") -> Any:
    def answer(_: object) -> dict[str, Any]:
        raise VgpuError(code, message, hint)

    return answer


# --- create ---------------------------------------------------------------------------------------------------------


def test_create_asks_for_what_the_options_say(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["create"] = lambda _: dump(vgpu_reading())
    options = "--sm 30% --mem 8G --quota-request 40 --quota-limit 60 --burst --priority high --gpu 1 --name t --ttl 8h"
    assert (
        run(
            [
                "create",
                *options.split(),
                "--overcommit",
                "--on-server-loss",
                "error",
                "--lease",
                "exclusive",
                "--idle-suspend",
                "10m",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == "vgpu-0a1b2c3d\n"
    [asked] = node.asked
    assert isinstance(asked, Create)
    assert asked.gpu == "1"
    assert asked.spec.model_dump(exclude_none=True) == {
        "sm_percent": 30.0,
        "memory_bytes": 8 << 30,
        "quota_request_percent": 40.0,
        "quota_limit_percent": 60.0,
        "burst": True,
        "overcommit": True,
        "priority": "high",
        "lease": "exclusive",
        "on_server_loss": "error",
        "name": "t",
        "ttl_ns": 8 * 3600 * 10**9,
        "idle_suspend_ns": 600 * 10**9,
    }


def test_create_prints_lines_that_a_shell_can_eval(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"VGPU_ID": "vgpu-0a1b2c3d", "VGPU_RUNTIME_DIR": "/tmp/it's $HOME", "VGPU_SIM_DIR": "/tmp/s i m"}
    node.answers["create"] = lambda _: dump(vgpu_reading(simulated=True, environment=odd))
    assert run(["create", "--sm", "30", "-o", "env"]) == 0
    script = capsys.readouterr().out + "env -0"
    told = subprocess.run(["/bin/sh", "-c", script], env={"PATH": os.defpath}, capture_output=True, check=True).stdout
    seen = dict(entry.decode().split("=", 1) for entry in told.rstrip(b"\0").split(b"\0"))
    assert seen["VGPU_ID"] == "vgpu-0a1b2c3d"
    assert seen["VGPU_RUNTIME_DIR"] == "/tmp/it's $HOME"
    assert seen["VGPU_SIM_DIR"] == "/tmp/s i m"
    assert seen["LD_PRELOAD"] == str(HOOK)
    assert seen["LD_LIBRARY_PATH"].endswith("/cython_ext/lib/sim")


def test_create_json_is_the_whole_reading(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    reading = vgpu_reading(name="größe")
    node.answers["create"] = lambda _: dump(reading)
    assert run(["create", "--fraction", "1/4", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == dump(reading)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sm", "0.3"], "less than 1 percent"),
        (["--sm", "130"], "not between 1 and 100"),
        (["--sm", "30", "--mem", "8Q"], "'8Q' is not a size"),
        (["--sm", "30", "--ttl", "8"], "'8' is not a duration"),
        ([], "give --sm 30"),
        (["--priority", "urgent", "--sm", "3"], "--priority"),
        (["--colour"], "--colour"),
    ],
)
def test_a_wrong_option_is_refused_with_the_reason_before_the_node_is_asked(
    node: FakeNode, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    assert run(["create", *options]) == Exit.USAGE
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""
    # A share that is not given may be the default of the user's quota, which the node knows.
    assert node.asked == ([] if options else [GetQuota(id=2)])


def test_what_is_promised_and_what_a_process_does(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    spatial = dump(vgpu_reading(mode="spatial", sm_percent_granted=30.303, guarantee_ratio=1.0, limit_ratio=1.0))
    node.answers["list"] = lambda _: {"vgpus": [spatial, spatial | {"guarantee_ratio": 0.4, "limit_ratio": 0.6}]}
    assert run(["ls"]) == 0
    said = capsys.readouterr().out
    assert "30.3 % SMs  " in said
    assert "30.3 % SMs × 40–60 %" in said
    kinds = ({"has_work": True}, {}, {"wants": False}, {"alive": False})
    node.answers["processes"] = lambda _: {"processes": [process_reading(**kind) for kind in kinds]}
    assert run(["ps"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[3] for row in rows] == ["running", "waiting", "idle", "died"]
    node.answers["list"] = lambda _: {"vgpus": [spatial | {"state": "suspended"}]}
    assert run(["ps"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[3] for row in rows] == ["suspended"] * 3 + ["died"]


def test_whose_processes_are_not_known_is_said(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["processes"] = lambda _: {"processes": [process_reading()], "silent_gpus": [3]}
    node.answers["list"] = lambda _: {"vgpus": []}
    for form in ("table", "json"):
        assert run(["ps", "-o", form]) == 0
        said = capsys.readouterr()
        assert said.err == "vgpuctl: GPU 3 does not answer: its programs are not listed\n  → vgpuctl gpu ls\n"
    assert len(json.loads(said.out)) == 1


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_refusal_has_its_exit_code_its_reason_and_a_next_step(
    node: FakeNode, capsys: pytest.CaptureFixture[str], code: ErrorCode
) -> None:
    node.answers["create"] = refuse(code, "it does not fit", "vgpuctl create --sm 20")
    assert run(["create", "--sm", "30"]) == FOR_ERROR[code]
    assert FOR_ERROR[code] != 0
    assert capsys.readouterr().err == "vgpuctl: it does not fit\n  → vgpuctl create --sm 20\n"


def test_without_a_node_it_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    for command in (["ls"], ["status"], ["create", "--sm", "30"], ["rm", "x"], ["gpu", "ls"], ["stop"]):
        assert run(command) == Exit.NODE_DOWN, command
        assert "vgpuctl serve" in capsys.readouterr().err
    assert run(["exec", "x", "--", "true"]) == Exit.LAUNCH


def test_the_command_for_a_node_is_one_that_works_on_this_machine(tmp_path: Path) -> None:
    assert driver.command_for_a_node(tmp_path) == "vgpuctl serve --detach --simulate 1"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert driver.command_for_a_node(tmp_path) == "vgpuctl serve --detach"


@pytest.mark.parametrize(("uid", "own"), [(0, None), (0, Path("/run")), (1000, None)])
def test_serve_warns_root_of_an_interpreter_that_others_cannot_run(
    uid: int, own: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``own``: what keeps others from the node itself; such a node is for root alone."""
    monkeypatch.setattr("vgpu.node.starting.start", lambda *_: SimpleNamespace(pid=7))
    monkeypatch.setattr("vgpu.node.starting.wait_until_serving", lambda *_: node_status())
    monkeypatch.setattr("vgpu.ctl.node.os.geteuid", lambda: uid)
    monkeypatch.setattr("vgpu.ctl.node.reach.closed_directories", lambda _: [own] if own else [])
    monkeypatch.setattr("vgpu.ctl.node.reach.closed_to_others", lambda: Path("/root"))
    assert run(["serve", "--detach"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("node 7 serves")
    warned = "other users cannot run this vgpuctl: /root is closed to them\n  → /usr/bin/python3 -m venv /opt/vgpu"
    assert (warned in said.err) == (uid == 0 and own is None)


def test_ps_names_the_vgpu_and_its_owner(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["list"] = lambda _: {"vgpus": [dump(vgpu_reading(name="trainer", owner_uid=0))]}
    node.answers["processes"] = lambda _: {"processes": [process_reading(), process_reading(vgpu_id="vgpu-00000009")]}
    assert run(["ps"]) == 0
    header, named, gone = capsys.readouterr().out.splitlines()
    assert named[header.index("NAME") :].split()[0] == "trainer"
    assert named[header.index("OWNER") :].split()[0] == "root"
    assert not gone[header.index("OWNER") :][:5].strip()


def test_a_mistyped_command_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["creat"]) == Exit.USAGE
    assert "create" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "asked"), [("delete x", "remove"), ("list", "list"), ("describe x", "inspect")])
def test_the_words_of_other_programs_are_commands(
    full_node: FakeNode, capsys: pytest.CaptureFixture[str], line: str, asked: str
) -> None:
    full_node.answers["remove"] = lambda _: dump(vgpu_reading())
    assert run(line.split()) == 0
    assert [request.op for request in full_node.asked] == [asked]


@pytest.mark.parametrize(("word", "meant"), [("kill", "vgpuctl rm -f"), ("new", "vgpuctl create")])
def test_a_word_with_two_meanings_names_the_command(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    assert run([word, "x"]) == Exit.USAGE
    assert f"Did you mean {meant}?" in capsys.readouterr().err


# --- lists ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_node(node: FakeNode) -> FakeNode:
    vgpus = [
        vgpu_reading(name="trainer"),
        vgpu_reading(vgpu_id="vgpu-99887766", name="a" * 60, memory_limit_bytes=100 << 30, guarantee_ratio=0.12),
        vgpu_reading(vgpu_id="vgpu-11111111", simulated=True, throttled=True, state="idle"),
    ]
    node.answers["list"] = lambda _: {"vgpus": [dump(vgpu) for vgpu in vgpus]}
    node.answers["processes"] = lambda _: {"processes": [process_reading(), process_reading(pid=7, alive=False)]}
    node.answers["gpus"] = lambda _: {"gpus": [dump(gpu_reading()), dump(gpu_reading(index=1, simulated=True))]}
    node.answers["inspect"] = lambda _: {
        "vgpu": dump(vgpus[0]),
        "gpu": dump(gpu_reading()),
        "processes": [process_reading()],
        "notes": ["a note"],
    }
    return node


def test_piped_tables_have_one_whole_row_each(full_node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["VGPU", "NAME", "GPU"]
    assert [row.split()[0] for row in rows] == ["vgpu-0a1b2c3d", "vgpu-99887766", "vgpu-11111111"]
    assert "a" * 60 in rows[1]
    assert "1 (sim)" not in rows[0]
    assert "0 (sim)" in rows[2]
    assert "\x1b" not in "".join(rows)
    assert run(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("/datasets/imagenet")


def test_quiet_prints_ids_alone(full_node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "-q"]) == 0
    assert capsys.readouterr().out.split() == ["vgpu-0a1b2c3d", "vgpu-99887766", "vgpu-11111111"]


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ("--filter gpu=0 --filter name=trainer", ["0a1b2c3d"]),
        ("--filter name=t*", ["0a1b2c3d"]),
        ("--filter state=at?limit", ["11111111"]),
        ("--filter owner=nobody-here", []),
        ("--sort id", ["0a1b2c3d", "11111111", "99887766"]),
        ("--sort share --filter mode=temporal", ["0a1b2c3d", "11111111", "99887766"]),
    ],
)
def test_ls_filters_and_sorts(
    full_node: FakeNode, capsys: pytest.CaptureFixture[str], line: str, ids: list[str]
) -> None:
    assert run(["ls", "-q", *line.split()]) == 0
    assert capsys.readouterr().out.split() == [f"vgpu-{one}" for one in ids]


@pytest.mark.parametrize("line", ["--filter idle", "--filter colour=red", "--sort colour"])
def test_ls_names_the_keys_that_it_knows(full_node: FakeNode, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(["ls", *line.split()]) == Exit.USAGE
    assert "  → " in capsys.readouterr().err


def test_the_forms_of_ls(full_node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == ["trainer", "a" * 60, "vgpu-11111111"]
    assert run(["ls", "-o", "wide"]) == 0
    assert "a" * 60 in capsys.readouterr().out
    assert run(["ls", "-o", "yaml"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second) == ('- vgpu_id: "vgpu-0a1b2c3d"', '  name: "trainer"')


def test_ls_shows_the_owners_name(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["list"] = lambda _: {"vgpus": [dump(vgpu_reading(owner_uid=uid)) for uid in (0, 4_000_000_000)]}
    assert run(["ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    at = header.index("OWNER")
    assert [row[at:].split()[0] for row in rows] == ["root", "4000000000"]


def test_ps_shows_arguments_shortened_and_printable(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sh", "-c", "read x", "\x1b[2J", "0" * 300], stdin=subprocess.PIPE) as program:
        node.answers["list"] = lambda _: {"vgpus": []}
        node.answers["processes"] = lambda _: {
            "processes": [process_reading(pid=program.pid, command=command) for command in ("sh", "another")]
        }
        try:
            assert run(["ps"]) == 0
        finally:
            program.kill()
    _, first, second = capsys.readouterr().out.splitlines()
    assert "sh -c read x ?[2J 000" in first
    assert first.endswith("0…")
    assert second.endswith("another")


@pytest.mark.parametrize("command", ["ls", "ps", "gpu ls", "inspect trainer"])
@pytest.mark.parametrize("columns", [80, 160])
def test_tables_fit_a_terminal(
    full_node: FakeNode, command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    from rich.cells import cell_len
    from rich.text import Text

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run(command.split()) == 0
    written = terminal.getvalue()
    assert "\x1b[" in written
    assert all(cell_len(Text.from_ansi(line).plain.rstrip()) <= columns for line in written.splitlines())


def test_inspect_tells_what_moves_and_advises_a_size(full_node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "trainer"]) == 0
    plain = capsys.readouterr().out
    assert not {"waiting", "window", "swapped", "advice"} & {line.split()[0] for line in plain.splitlines() if line}
    moving = {"waiting_ns": 2_300_000_000, "window_ns": 8_000_000, "swaps_out": 3, "swaps_in": 2}
    advice = {"observed_ns": 1, "busy_ratio": 0.1, "memory_peak_bytes": 1, "sm_percent": 12, "memory_bytes": 1}
    before = full_node.answers["inspect"](None)
    full_node.answers["inspect"] = lambda _: before | {"advice": advice | {"text": ""}}
    assert run(["inspect", "trainer"]) == 0
    assert capsys.readouterr().out == plain
    assert isinstance(before, dict)
    text = "It used 10 % of the GPU: vgpuctl set vgpu-0a1b2c3d --sm 12"
    moved = before["vgpu"] | moving | {"memory_away_bytes": 1 << 30}
    full_node.answers["inspect"] = lambda _: before | {"vgpu": moved, "advice": advice | {"text": text}}
    assert run(["inspect", "trainer"]) == 0
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert told["waiting"].endswith("since 2s300ms")
    assert "8ms" in told["window"]
    assert told["swapped"].endswith("3 times out, 2 in; 1 GiB is away")
    assert told["advice"] == f"advice    {text}"


@pytest.mark.parametrize("command", ["ls", "ps", "gpu ls", "inspect trainer"])
def test_json_is_what_the_node_said(full_node: FakeNode, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([*command.split(), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first = told["vgpu"] if command.startswith("inspect") else told[0]
    assert first.get("vgpu_id", "vgpu-0a1b2c3d") == "vgpu-0a1b2c3d"


# --- changes --------------------------------------------------------------------------------------------------------


def test_set_sends_only_what_was_given(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["set"] = lambda _: dump(vgpu_reading())
    assert run(["set", "trainer", "--sm", "50", "--no-burst"]) == 0
    [asked] = node.asked
    assert isinstance(asked, Set)
    assert asked.vgpu == "trainer"
    assert asked.changes.model_dump(exclude_none=True) == {"sm_percent": 50.0, "burst": False}
    assert run(["set", "trainer"]) == Exit.USAGE


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ("--sm +10 --mem -512M", {"sm_percent": 40.0, "memory_bytes": (8 << 30) - (512 << 20)}),
        ("--sm -5%", {"sm_percent": 25.0}),
    ],
)
def test_set_by_so_much(node: FakeNode, options: str, changes: dict[str, Any]) -> None:
    vgpu = dump(vgpu_reading(spec=VgpuSpec(sm_percent=30, memory_bytes=8 << 30)))
    node.answers["inspect"] = lambda _: {"vgpu": vgpu, "gpu": dump(gpu_reading()), "processes": [], "notes": []}
    node.answers["set"] = lambda _: vgpu
    assert run(["set", "x", *options.split()]) == 0
    assert node.asked[-1].changes.model_dump(exclude_none=True) == changes
    assert run(["set", "x", "--sm", "-30"]) == Exit.USAGE
    assert run(["set", "x", "--mem", "+much"]) == Exit.USAGE


def test_prune_removes_own_vgpus_without_programs(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    idle = {"state": "idle", "processes": 0}
    vgpus = [
        vgpu_reading(**idle),
        vgpu_reading(vgpu_id="vgpu-00000001"),
        vgpu_reading(vgpu_id="vgpu-00000002", owner_uid=os.getuid() + 1, **idle),
        vgpu_reading(vgpu_id="vgpu-00000003", lifetime="process", asker_pid=1, **idle),
    ]
    node.answers["list"] = lambda _: {"vgpus": [dump(vgpu) for vgpu in vgpus]}
    node.answers["remove"] = lambda _: dump(vgpus[0])
    with Path(os.devnull).open() as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nothing)
        assert run(["prune"]) == Exit.USAGE
    assert "→ vgpuctl prune --yes" in capsys.readouterr().err
    assert run(["prune", "--yes"]) == 0
    assert capsys.readouterr().out == "vgpu-0a1b2c3d\n"
    assert [(one.vgpu, one.force) for one in node.asked if one.op == "remove"] == [("vgpu-0a1b2c3d", False)]


def test_gpu_set(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["set-gpu"] = lambda _: dump(gpu_reading())
    assert run(["gpu", "set", "0", "--mode", "temporal", "--period", "40ms"]) == 0
    [asked] = node.asked
    assert isinstance(asked, SetGpu)
    assert (asked.gpu, asked.mode, asked.period_ns) == ("0", "temporal", 40_000_000)
    assert run(["gpu", "set", "0", "--window", "6ms"]) == 0
    asked = node.asked.pop()
    assert isinstance(asked, SetGpu)
    assert (asked.mode, asked.period_ns, asked.window_ns) == (None, None, 6_000_000)
    assert run(["gpu", "set", "0"]) == Exit.USAGE
    assert run(["gpu", "set", "0", "--window", "1s"]) == Exit.USAGE
    assert "1s is not between 250µs and 100ms" in capsys.readouterr().err
    for bad in ("40", "1ns", "10h"):
        assert run(["gpu", "set", "0", "--period", bad]) == Exit.USAGE
    assert "10h is not between 5ms and 1s" in capsys.readouterr().err
    assert len(node.asked) == 1


@pytest.mark.parametrize(("group", "title"), [([], "vGPUs:"), (["gpu"], "Commands:"), (["hook"], "Commands:")])
def test_a_group_alone_tells_what_it_holds(group: list[str], title: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(group) == 0
    assert title in capsys.readouterr().out


def test_bad_choices_are_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "-o", "xml"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "'xml' is not one of 'table', 'wide', 'name', 'yaml', 'json'" in said
    assert "Value error" not in said


@pytest.mark.parametrize(
    "line", ["serve --simulate x", "serve --simulate 99", "serve --gpu 1.5", "events -n x", "trace --seconds x"]
)
def test_a_number_that_is_none_is_refused_in_plain_words(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == Exit.USAGE
    said = capsys.readouterr().err
    assert "invalid value for" in said
    assert "Input" not in said
    assert "parse" not in said


def test_version_is_an_option_too(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vgpuctl ")


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ("vgpuctl: no GPU here\n  → vgpuctl serve --simulate 1\n", "no GPU here", "vgpuctl serve --simulate 1"),
        ("Traceback:\n  +---\n  | ValueError: boom\n  +-----\n", "ValueError: boom", "vgpuctl doctor, or less"),
        ("", "it said nothing", "vgpuctl doctor, or less"),
    ],
)
def test_why_a_node_did_not_start(tmp_path: Path, said: str, message: str, hint: str) -> None:
    log = tmp_path / "node.log"
    log.write_text(said)
    error = did_not_start(log)
    assert error.message == f"the node did not start: {message}"
    assert error.hint.startswith(hint)
    assert FOR_ERROR[error.code] is Exit.NODE_DOWN


def test_serve_beside_a_node_exits_alike_detached_or_not(tmp_path: Path) -> None:
    """docs/reference/cli.md: 4, a node runs already."""
    log = tmp_path / "node.log"
    log.write_text("vgpuctl: a node runs already in /run/vgpu\n")
    assert FOR_ERROR[did_not_start(log, Exit.REFUSED).code] is Exit.REFUSED


@pytest.mark.parametrize(
    ("used_bytes", "shown"), [(0, "0 / 8 GiB"), (2 * MIB, "2 MiB / 8 GiB"), (512 * MIB, "0.5 / 8 GiB")]
)
def test_what_is_used_of_a_limit(used_bytes: int, shown: str) -> None:
    assert used_of(used_bytes, 8 * GIB) == shown
    assert used_of(1480 * MIB, 512 * MIB) == "1480 / 512 MiB"


def test_the_help_of_set_names_no_default_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not given to ``set`` stays as it is; only a new vGPU has defaults."""
    assert run(["set", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.partition("What a share means")[0].split())
    assert "What is not given stays as it is." in told
    assert "; else " not in told


def test_rm_removes_what_it_can_and_exits_with_the_worst(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: Remove) -> dict[str, Any]:
        if request.vgpu == "busy":
            raise VgpuError(ErrorCode.IN_USE, "busy has 1 process", "vgpuctl rm -f busy")
        return dump(vgpu_reading(vgpu_id=request.vgpu))

    node.answers["remove"] = answer
    assert run(["rm", "vgpu-00000001", "busy", "vgpu-00000002"]) == Exit.REFUSED
    said = capsys.readouterr()
    assert said.out.split() == ["vgpu-00000001", "vgpu-00000002"]
    assert "vgpuctl rm -f busy" in said.err
    assert [request.force for request in node.asked] == [False] * 3
    assert run(["rm", "-f", "vgpu-00000001"]) == 0
    assert node.asked[-1].force


# --- programs -------------------------------------------------------------------------------------------------------


def vgpuctl(runtime_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: exec replaces it. The hook is switched off by a library that is only named like it."""
    script = (
        "import sys; from pathlib import Path; import client_hook.environment as e;"
        "e.hook_to_preload = lambda: None; from vgpu.ctl.main import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "VGPU_RUNTIME_DIR": str(runtime_dir), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_exec_runs_the_program_in_the_vgpu(full_node: FakeNode, tmp_path: Path) -> None:
    done = vgpuctl(tmp_path, "exec", "trainer", "--", "sh", "-c", "echo $VGPU_ID --help; exit 42")
    assert (done.stdout, done.returncode) == ("vgpu-0a1b2c3d --help\n", 42)
    assert full_node.asked[0].vgpu == "trainer"


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_the_program_begins_at_the_first_word_that_is_no_option(
    full_node: FakeNode, tmp_path: Path, dashes: list[str]
) -> None:
    done = vgpuctl(tmp_path, "exec", "--allow-unhooked", "trainer", *dashes, "echo", "--help", "--", "-x")
    assert (done.stdout, done.returncode) == ("--help -- -x\n", 0)
    full_node.answers["create"] = full_node.answers["remove"] = lambda _: dump(vgpu_reading())
    done = vgpuctl(tmp_path, "run", "--sm", "30", "--burst", "--mem=1G", *dashes, "echo", "--sm", "40", "--")
    assert (done.stdout, done.returncode) == ("--sm 40 --\n", 0)


def test_exec_of_a_program_alone_says_how_the_vgpu_in_vgpu_id_gets_it(node: FakeNode, tmp_path: Path) -> None:
    node.answers["inspect"] = refuse(ErrorCode.NOT_FOUND, "there is no vGPU 'sh'", "see: vgpuctl ls")
    done = vgpuctl(tmp_path, "exec", "sh", "true", VGPU_ID="vgpu-0a1b2c3d")
    assert done.returncode == Exit.LAUNCH
    assert "vgpuctl exec -- sh" in done.stderr


def test_exec_takes_the_vgpu_from_the_environment(full_node: FakeNode, tmp_path: Path) -> None:
    assert vgpuctl(tmp_path, "exec", "--", "true", VGPU_ID="vgpu-0a1b2c3d").returncode == 0
    assert full_node.asked[0].vgpu == "vgpu-0a1b2c3d"


def test_exec_does_not_start_a_program_in_somebody_elses_vgpu(
    full_node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4711)
    assert run(["exec", "trainer", "--", "true"]) == Exit.LAUNCH
    said = capsys.readouterr().err
    assert "you are uid 4711" in said
    assert "→ vgpuctl create" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["exec", "x"],
        ["exec", "x", "--allow-unhooked"],
        ["exec", "x", "--"],
        ["run", "--sm", "30"],
        ["run", "--sm", "--", "ls"],
        ["exec", "--", "ls"],
    ],
)
def test_a_launch_that_cannot_begin_is_125(node: FakeNode, tmp_path: Path, arguments: list[str]) -> None:
    done = vgpuctl(tmp_path, *arguments)
    assert done.returncode == Exit.LAUNCH
    assert "→ vgpuctl" in done.stderr
    assert node.asked == []


def test_run_makes_a_vgpu_and_removes_it_after(node: FakeNode, tmp_path: Path) -> None:
    node.answers["create"] = lambda _: dump(vgpu_reading())
    node.answers["remove"] = lambda _: dump(vgpu_reading())
    done = vgpuctl(tmp_path, "run", "--sm", "30", "--mem", "1G", "--", "sh", "-c", "echo $VGPU_ID; kill -9 $$")
    assert (done.stdout, done.returncode) == ("vgpu-0a1b2c3d\n", 137)
    assert [request.op for request in node.asked] == ["create", "remove"]
    assert node.asked[1].force


def test_run_puts_a_sanitizers_runtime_first(node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text("""
#include <stdio.h>
#include <stdlib.h>
int main(void) { puts(getenv("LD_PRELOAD")); return 0; }
""")
    main = tmp_path / "main"
    if subprocess.run(["gcc", "-fsanitize=address", "-o", main, tmp_path / "main.c"], check=False).returncode:
        pytest.skip("gcc here has no runtime for -fsanitize=address")
    node.answers["create"] = lambda _: dump(vgpu_reading())
    node.answers["remove"] = lambda _: dump(vgpu_reading())
    done = vgpuctl(tmp_path, "run", "--sm", "30", "--", str(main))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("libasan.so")


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_run_removes_the_vgpu_of_a_program_that_never_ran(
    node: FakeNode, tmp_path: Path, program: str, code: int
) -> None:
    node.answers["create"] = lambda _: dump(vgpu_reading())
    node.answers["remove"] = lambda _: dump(vgpu_reading())
    assert vgpuctl(tmp_path, "run", "--sm", "30", "--", program).returncode == code
    assert [request.op for request in node.asked] == ["create", "remove"]


def test_run_says_that_its_vgpu_stays_where_the_node_has_ended(node: FakeNode, tmp_path: Path) -> None:
    node.answers["create"] = lambda _: dump(vgpu_reading())
    node.answers["remove"] = refuse(ErrorCode.UNREACHABLE, "no node answers")
    done = vgpuctl(tmp_path, "run", "--sm", "30", "--", "true")
    assert done.returncode == 0
    assert "vgpu-0a1b2c3d stays: no node answers" in done.stderr
    assert "→ once a node runs again: vgpuctl rm vgpu-0a1b2c3d" in done.stderr


def test_run_that_is_refused_runs_nothing(node: FakeNode, tmp_path: Path) -> None:
    node.answers["create"] = refuse(ErrorCode.NO_ROOM, "no room", "--sm 20 would fit")
    done = vgpuctl(tmp_path, "run", "--sm", "30", "--", "echo", "ran")
    assert (done.stdout, done.returncode) == ("", Exit.LAUNCH)


# --- speed ----------------------------------------------------------------------------------------------------------


def test_ls_imports_nothing_it_does_not_need(full_node: FakeNode, tmp_path: Path) -> None:
    """What `vgpuctl ls` has 200 ms for; the modules named here cost 20 to 150 ms each."""
    script = (
        "import sys; from vgpu.ctl.main import run; code = run(['ls', '-o', 'json']); assert code == 0;"
        "print(*[m for m in ('rich', 'trio', 'structlog', 'pynvml', 'psutil', 'asyncio', 'vgpu.demo.run',"
        " 'client_hook.install') if m in sys.modules], file=sys.stderr)"
    )
    environment = os.environ | {"VGPU_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("command", ["create", "set", "run"])
def test_the_formula_of_a_share_is_the_end_of_the_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    told = capsys.readouterr().out
    kept = [line for line in MEANING.splitlines() if line.startswith(" ")]
    assert len(kept) == 2
    assert all(line in told for line in kept)
    assert " ".join(told.split()).endswith("(Tassiulas, Ephremides 1992).")
    assert max(map(len, told.splitlines())) <= 80
