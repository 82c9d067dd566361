"""``vgpuctl --nodes FILE``: two nodes of real processes, one over the HTTP API and one over SSH."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from client_hook import interpreter
from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.errors import VgpuError
from vgpu.nodes.file import load

SSH: Final = """#!/bin/sh
# A host named "down" does not answer; every other one is this machine, with the environment of the second node.
for word; do
    case "$word" in down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255;; esac
    last="$word"
done
echo "$*" >> "{log}"
{exports}
eval "exec $last"
"""


class Several:
    """Two nodes with a GPU each, and the file that names them."""

    def __init__(self, folder: Path, first: SimulatedNode, second: SimulatedNode) -> None:
        self.folder, self.first, self.second = folder, first, second
        self.file = folder / "nodes.toml"
        self.log = folder / "ssh.log"
        self.log.touch()
        names = ("VGPU_RUNTIME_DIR", "VGPU_STATE_DIR", "PYTHONPATH")
        exports = "\n".join(f"export {name}={shlex.quote(second.environment[name])}" for name in names)
        self._script("ssh", SSH.format(exports=exports, log=self.log))
        self._script("vgpuctl", f'#!/bin/sh\nexec {shlex.join(interpreter.command("vgpu.ctl"))} "$@"\n')

    def _script(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def write(self, url: str, *more: str, policy: str = "spread") -> None:
        lines = [f'policy = "{policy}"', "[node.alpha]", f'url = "{url}"', 'token_file = "token"']
        self.file.write_text("\n".join([*lines, "[node.beta]", 'ssh = "me@beta"', *more]) + "\n")

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``vgpuctl --nodes FILE WORDS``, on a machine without a node."""
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "VGPU_RUNTIME_DIR": str(self.folder / "none"),
            "COLUMNS": "200",
        }
        command = interpreter.command("vgpu.ctl", "--nodes", str(self.file), *words)
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Several, str]]:
    folder = tmp_path_factory.mktemp("nodes")
    with SimulatedNode(1) as first, SimulatedNode(1) as second:
        words = ["dashboard", "--listen", "127.0.0.1:0", "--token-file", str(folder / "token")]
        command = interpreter.command("vgpu.ctl", *words)
        dashboard = subprocess.Popen(command, env=first.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert dashboard.stdout is not None
            dashboard.stdout.readline()
            url = dashboard.stdout.readline().strip().partition("?")[0]
            yield Several(folder, first, second), url
        finally:
            dashboard.terminate()
            dashboard.communicate()


@pytest.fixture
def nodes(running: tuple[Several, str]) -> Iterator[Several]:
    several, url = running
    several.write(url)
    yield several
    several.first.clear()
    several.second.clear()


@pytest.mark.slow
def test_create_takes_the_node_that_the_policy_chooses_and_ls_lists_all(nodes: Several) -> None:
    made = [nodes("create", "--sm", "40", "--mem", "8G", "--name", name) for name in ("a", "b", "c")]
    assert [one.returncode for one in made] == [0, 0, 0], made
    places = [one.stdout.strip().partition("/") for one in made]
    assert sorted(place[0] for place in places[:2]) == ["alpha", "beta"], "spread takes the emptier node"
    listed = nodes("ls")
    assert (listed.returncode, listed.stderr) == (0, "")
    header, *rows = listed.stdout.splitlines()
    assert header.split()[:3] == ["NODE", "VGPU", "NAME"]
    assert sorted(row.split()[:3] for row in rows) == sorted(
        [node, vgpu_id, name] for (node, _, vgpu_id), name in zip(places, "abc", strict=True)
    )
    with nodes.first.link() as one, nodes.second.link() as other:
        assert {vgpu.vgpu_id for vgpu in (*one.list(), *other.list())} == {place[2] for place in places}
    records = json.loads(nodes("ls", "-o", "json", "--sort", "name").stdout)
    assert {(one["node"], one["vgpu_id"]) for one in records} == {(place[0], place[2]) for place in places}
    assert nodes("ls", "-q", "--filter", "name=a").stdout == made[0].stdout
    whole = nodes("top", "--once").stdout
    assert [line.split()[:2] for line in whole.splitlines()[:3]] == [["NODE", "GPU"], ["alpha", "0"], ["beta", "0"]]
    assert all(place[2] in whole for place in places)


@pytest.mark.slow
def test_usage_is_summed_over_the_nodes(nodes: Several) -> None:
    made = [nodes("create", "--sm", "40", "--mem", "8G").stdout.strip() for _ in range(2)]

    def rows() -> list[dict[str, object]] | None:
        said = nodes("usage", "--since", "1h", "--by", "vgpu", "-o", "json")
        found = [row for row in json.loads(said.stdout)["rows"] if row["vgpu_id"] in made]
        return found if len(found) == 2 else None

    eventually(rows, "both nodes' first rows")
    (total,) = json.loads(nodes("usage", "--since", "1h", "-o", "json").stdout)["rows"]
    assert total["promised_gpu_hours"] > 0
    assert nodes("usage", "--since", "1h", "-o", "csv").stdout.count("\n") == 2
    assert nodes("usage", "--since", "1d", "--until", "2d").returncode == 2
    nodes.write("http://127.0.0.1:9")
    partial = nodes("usage")
    assert (partial.returncode, partial.stderr.splitlines()[0].startswith("vgpuctl: node alpha")) == (5, True)
    assert partial.stdout.startswith("USER")


@pytest.mark.slow
def test_pack_fills_a_node_and_what_fits_nowhere_is_refused_with_the_reason(nodes: Several) -> None:
    nodes.file.write_text(nodes.file.read_text().replace("spread", "pack"))
    first, second, third, refused = (nodes("create", "--sm", "50", "--mem", "1G") for _ in range(4))
    place = first.stdout.partition("/")[0]
    assert second.stdout.startswith(f"{place}/")
    assert third.returncode == refused.returncode == 0
    assert not refused.stdout.startswith(f"{place}/")
    none = nodes("create", "--sm", "50", "--mem", "1G")
    assert (none.returncode, none.stdout) == (4, "")
    assert "vgpuctl: node " in none.stderr


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_a_line_and_the_others_are_shown(nodes: Several) -> None:
    nodes.file.write_text(
        nodes.file.read_text() + '[node.gamma]\nssh = "down"\n[node.delta]\nurl = "http://127.0.0.1:1"\n'
    )
    made = nodes("create", "--sm", "10", "--mem", "1G")
    assert made.returncode == 0, made.stderr
    listed = nodes("ls", "-q")
    assert (listed.returncode, listed.stdout) == (5, made.stdout)
    gamma, delta = listed.stderr.splitlines()
    assert gamma == "vgpuctl: node gamma: ssh down: ssh: connect to host down port 22: Connection refused"
    assert delta.startswith("vgpuctl: node delta: http://127.0.0.1:1 does not answer")


@pytest.mark.slow
def test_other_commands_take_a_node_and_a_vgpu(nodes: Several) -> None:
    by_node = {}
    for _ in range(2):
        reference = nodes("create", "--sm", "30", "--mem", "2G").stdout.strip()
        by_node[reference.partition("/")[0]] = reference
    changed = nodes("set", by_node["beta"], "--sm", "20")
    assert changed.returncode == 0, changed.stderr
    detail = json.loads(nodes("inspect", by_node["alpha"]).stdout)
    assert detail["vgpu"]["vgpu_id"] == by_node["alpha"].partition("/")[2]
    assert "20" in nodes("inspect", by_node["beta"]).stdout
    refused = nodes("set", by_node["alpha"], "--sm", "20")
    assert refused.returncode == 2
    assert "is not possible over HTTP" in refused.stderr
    for reference in by_node.values():
        assert nodes("rm", reference).returncode == 0
    assert nodes("rm", by_node["alpha"]).returncode == 3
    assert nodes("rm", by_node["beta"]).returncode == 3
    assert nodes("ls", "-q").stdout == ""
    none = nodes("rm", "omega/1")
    assert (none.returncode, "names no vGPU as NODE/VGPU" in none.stderr) == (2, True)
    assert "names several nodes" in nodes("rm", *by_node.values()).stderr


@pytest.mark.slow
def test_a_wrong_token_is_refused(nodes: Several) -> None:
    token = nodes.folder / "token"
    right = token.read_text()
    token.write_text("x" * 32)
    try:
        listed = nodes("ls")
    finally:
        token.write_text(right)
    assert listed.returncode != 0
    assert listed.stderr.startswith("vgpuctl: node alpha: ")


@pytest.mark.slow
def test_words_for_another_machine_stay_words(nodes: Several) -> None:
    """They pass through a shell there."""
    done = nodes("rm", "beta/$(touch INJECTED);x y")
    assert done.returncode == 3
    assert not (ROOT / "INJECTED").exists()


@pytest.mark.slow
def test_the_options_of_one_node_are_refused(nodes: Several) -> None:
    for words, said in (
        (["create", "--sm", "10", "--gpu", "0"], "--gpu is a GPU of one node"),
        (["create", "--sm", "10", "-o", "env"], "-o env is for a vGPU of this machine"),
        (["ls", "-o", "yaml"], "-o yaml is for one node"),
    ):
        done = nodes(*words)
        assert done.returncode == 2
        assert said in done.stderr
    command = interpreter.command("vgpu.ctl", "--version", "--nodes", "x")
    late = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "--nodes FILE comes before all other options" in late.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[node.a", "a TOML"),
        ("", "node"),
        ("[node.a]", "give url or ssh"),
        ('[node.a]\nssh = "h"\nurl = "http://h"', "give url or ssh"),
        ('[node.a]\nssh = "-oProxyCommand=x"', "node.a.ssh"),
        ('[node.a]\nssh = "h"\ntoken_file = "t"', "token_file goes with url"),
        ('[node.a]\nurl = "ftp://h"', "is no address such as"),
        ('[node."a/b"]\nssh = "h"', "node"),
        ('policy = "best"\n[node.a]\nssh = "h"', "policy"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(VgpuError, match=r"--nodes: .*") as caught:
        load(path)
    assert words in caught.value.message or words == "a TOML"
    with pytest.raises(VgpuError, match="cannot read"):
        load(tmp_path / "none")
