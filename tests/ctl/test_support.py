"""vgpuctl support bundle: what is in it, what never is, and that nothing that fails stops it."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import FakeNode, gpu_reading, node_status, process_reading, vgpu_reading
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.errors import VgpuError
from vgpu.protocol.messages import EventReading, OutsideProcess
from vgpu.support.bundle import write
from vgpu.support.parts import Part, _configurations
from vgpu.support.redaction import (
    Person,
    Redactor,
    are_people,
    short_command,
    told_environment,
    without_commands,
    without_process_names,
    without_secrets,
)

ALICE, BOB, ROOT = (
    Person("alice", 1000, "/home/alice"),
    Person("bob.smith", 1001, "/data/bob"),
    Person("root", 0, "/root"),
)
SECRETS = ("hunter2", "alice", "/data/bob", "bob.smith", "gpubox", "--api-key")


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = {}
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            folder, _, name = entry.name.partition("/")
            assert folder == "b"
            assert (entry.mode, entry.uid, entry.uname) == (0o600, 0, "")
            members[name] = file.read().decode()
    return members


# --- what is replaced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/alice/x by alice", "~user1000/x by user1000"),
        ("/home/alicesmith/x", "/home/user/x"),
        ("malice alice2 alice-x", "malice alice2 user1000-x"),
        ("/data/bob/y, /data/bobby", "~user1001/y, /data/bobby"),
        ("bob.smith@gpubox.lab.example gpubox", "user1001@host host"),
        ("/root/a, /rooted, root", "~user0/a, /rooted, root"),
        ('{"path": "/home/carol/z"}', '{"path": "/home/user/z"}'),
        (r'{"text": "in \"/home/carol\""}', r'{"text": "in \"/home/user\""}'),
        (r'{"text": "/home/\"", "home": "/home/LAB\\carol\\"}', r'{"text": "/home/\"", "home": "/home/user"}'),
    ],
)
def test_people_homes_and_the_machine(text: str, told: str) -> None:
    assert Redactor([ALICE, BOB, ROOT], ["gpubox.lab.example"])(text) == told


@given(st.lists(st.sampled_from([*SECRETS, " ", "/", '"', "\n", "x", "vgpu-1", "/home/", "-", ":"])), st.booleans())
def test_json_stays_json_and_no_name_stays(words: list[str], spaced: bool) -> None:
    said = {"text": (" " if spaced else "").join(words), "level": "info"}
    told = Redactor([ALICE, BOB, ROOT], ["gpubox"])(json.dumps(said))
    assert set(json.loads(told)) == set(said)
    if spaced:
        assert not {"alice", "gpubox", "bob.smith"} & set(json.loads(told)["text"].split())


def test_nobody_to_replace() -> None:
    assert Redactor([])("alice in /tmp, /home/eve") == "alice in /tmp, /home/user"
    accounts = [ALICE, BOB, ROOT, Person("daemon", 1, "/"), Person("nobody", 65534, "/"), Person("www", 33, "/var/www")]
    assert are_people(accounts, {33}) == [ALICE, BOB, accounts[-1]]


def test_programs_have_names_and_no_arguments() -> None:
    assert short_command("/opt/my/trainer-of-everything --token=hunter2") == "trainer-of-ever"
    assert short_command("") == short_command("  ") == ""
    assert short_command('a"b\\') == "ab"
    said = "process 12 (/usr/bin/python3 x(1) --key) attached, process 13 ended"
    assert without_commands(said) == "process 12 (python3) attached, process 13 ended"
    line = "        Process ID                        : 1\n            Name                          : /opt/x/y --z\n"
    assert without_process_names("    Product Name                          : NVIDIA H200\n" + line).split() == (
        ["Product", "Name", ":", "NVIDIA", "H200", "Process", "ID", ":", "1", "Name", ":", "y"]
    )


def test_of_environment_and_configuration_what_is_ours() -> None:
    told = told_environment(
        {
            "VGPU_ID": "vgpu-1",
            "VGPU_DASHBOARD_TOKEN": "hunter2",
            "CUDA_VISIBLE_DEVICES": "0",
            "LD_PRELOAD": "/x.so",
            "AWS_SECRET": "hunter2",
            "PATH": "/bin",
            "XVGPU_ID": "no",
        }
    )
    assert told == {
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_PRELOAD": "/x.so",
        "VGPU_DASHBOARD_TOKEN": "(hidden)",
        "VGPU_ID": "vgpu-1",
    }
    text = '[dashboard]\nlisten = "[::1]:1"\n token="hunter2"\napi-key = \'hunter2\' # x\n'
    hidden = without_secrets(text)
    assert "hunter2" not in hidden
    assert 'listen = "[::1]:1"' in hidden


# --- the file -------------------------------------------------------------------------------------------------------


def test_what_fails_is_noted_and_the_rest_is_there(tmp_path: Path) -> None:
    def fail() -> str:
        raise RuntimeError("alice broke it")

    shown: list[str] = []
    parts = [Part("a.txt", lambda: "of alice\udcff"), Part("b.txt", fail), Part("c/d.txt", lambda: "")]
    made = write(tmp_path / "b.tar.gz", parts, Redactor([ALICE]), redacted=True, show=shown.append)
    found = contents(tmp_path / "b.tar.gz")
    assert found["a.txt"] == "of user1000\\udcff"
    assert found["c/d.txt"] == ""
    assert "b.txt: user1000 broke it" in found["README.txt"]
    assert made.missing == (("b.txt", "user1000 broke it"),)
    assert [name for name, _ in made.files] == list(found)
    assert shown == ["a.txt", "b.txt", "c/d.txt"]
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600


def test_it_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_text("before")

    def interrupted() -> str:
        assert len(list(tmp_path.iterdir())) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, [Part("a", interrupted)], str, redacted=False)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    for impossible in (tmp_path, tmp_path / "none" / "b.tar.gz"):
        with pytest.raises(VgpuError, match="cannot write"):
            write(impossible, [], str, redacted=False)


def test_the_configuration_that_counts(tmp_path: Path) -> None:
    own = tmp_path / "vgpu" / "config.toml"
    own.parent.mkdir()
    own.touch()
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert own in _configurations(environment) or Path("/etc/vgpu/config.toml").exists()
    other = tmp_path / "config.toml"
    other.touch()
    assert _configurations(environment | {"VGPU_CONFIG": str(other)})[0] == other


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def full(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A node that tells everything but a trace, on a machine of alice's."""
    monkeypatch.setattr(
        "client_hook.doctor.probe_driver", lambda *_: __import__("client_hook.doctor").doctor.DriverFacts()
    )
    monkeypatch.setattr("pwd.getpwall", list)
    monkeypatch.setattr("socket.gethostname", lambda: "gpubox")
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setenv("VGPU_STATE_DIR", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gpu-0.log").write_text(
        '{"event": "of alice", "text": "process 7 (x --api-key=1) attached"}\n'
    )
    outside = OutsideProcess(gpu_index=0, pid=8, uid=0, command="python", memory_bytes=1)
    gpu = gpu_reading(outside=(outside,)).model_dump(mode="json")
    vgpu = vgpu_reading(name="mine").model_dump(mode="json")
    process = process_reading(command="/home/alice/train.py --api-key hunter2")
    status = node_status(state_dir=str(tmp_path), gpus=[gpu]).model_dump(mode="json")
    event = EventReading(
        at_unix_s=1, kind="attached", gpu_index=0, text="process 7 (/home/alice/train.py --api-key hunter2) attached"
    )
    snapshot = {"at_unix_s": 1.0, "gpus": [gpu], "vgpus": [vgpu]}
    told: dict[str, dict[str, Any]] = {
        "status": status,
        "gpus": {"gpus": [gpu]},
        "list": {"vgpus": [vgpu]},
        "processes": {"processes": [process]},
        "inspect": {"vgpu": vgpu, "gpu": gpu, "processes": [process], "notes": []},
        "meter": {"snapshot": snapshot, "processes": [process], "gpus": [], "vgpus": []},
        "events": {"events": [event.model_dump(mode="json")]},
    }
    for op, answer in told.items():
        node.answers[op] = lambda _, answer=answer: answer
    return node


def test_a_whole_bundle(full: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["support", "bundle", "-o", str(tmp_path / "b.tar.gz"), "--no-trace"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = contents(tmp_path / "b.tar.gz")
    assert set(found) >= {
        "README.txt", "versions.json", "doctor.json", "environment.json", "status.json", "gpus.json", "vgpus.json",
        "processes.json", "inspect/vgpu-0a1b2c3d.json", "metrics.json", "events.jsonl", "logs/gpu-0.log", "folders.txt",
    }  # fmt: skip
    for name, text in found.items():
        assert not [secret for secret in SECRETS if secret in text], name
        assert name in said.out
        if name.endswith(".json"):
            json.loads(text)
    inside, outside = json.loads(found["processes.json"])
    assert (inside["command"], outside["command"]) == ("train.py", "python")
    assert "process 7 (train.py) attached" in found["events.jsonl"]


def test_without_redaction_names_stay_and_secrets_do_not(full: FakeNode, tmp_path: Path) -> None:
    assert run(["support", "bundle", "-o", str(tmp_path / "b.tar.gz"), "--no-trace", "--no-redact"]) == 0
    found = contents(tmp_path / "b.tar.gz")
    assert "of alice" in found["logs/gpu-0.log"]
    assert not [name for name, text in found.items() if "hunter2" in text or "--api-key" in text]


def test_without_a_node_there_is_still_much_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("VGPU_STATE_DIR", str(tmp_path / "state"))
    assert run(["support", "bundle", "-o", str(tmp_path / "b.tar.gz")]) == 0
    found = contents(tmp_path / "b.tar.gz")
    assert {"versions.json", "doctor.json", "folders.txt"} <= set(found)
    assert "status.json: no node answers" in found["README.txt"]
    assert "without status.json" in capsys.readouterr().err
    assert run(["support", "bundle", "-o", str(tmp_path)]) == Exit.USAGE
