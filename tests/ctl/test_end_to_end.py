"""The ways into a vGPU, each as a person types it, on a simulated node that vgpuctl itself has started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.node import eventually
from tests.processes import ended
from vgpu.ctl.exit_codes import Exit

ROOT = Path(__file__).parents[2]
WORKLOAD = f"{sys.executable} -m vgpu.workload --seconds 0.2 -o json"
MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Node:
    """A shell on a machine that has a node, ``vgpuctl``, and nothing of a vGPU in its environment."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.directory / "home"),
            "PYTHONPATH": str(ROOT),
            "VGPU_RUNTIME_DIR": str(self.directory / "run"),
            "VGPU_STATE_DIR": str(self.directory / "state"),
        }

    def shell(self, script: str, *shell: str) -> subprocess.CompletedProcess[str]:
        """Runs ``script``, by default with /bin/sh, outside of the repository."""
        return subprocess.run(
            [*(shell or ("/bin/sh",)), "-c", script],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
        )

    def ids(self) -> list[str]:
        return self.shell("vgpuctl ls -q").stdout.split()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("node")
    (directory / "bin").mkdir()
    (directory / "home").mkdir()
    vgpuctl = directory / "bin" / "vgpuctl"
    vgpuctl.write_text(f'#!/bin/sh\nexec {sys.executable} -m vgpu.ctl "$@"\n')
    vgpuctl.chmod(0o755)
    made = Node(directory)
    served = made.shell("vgpuctl serve --detach --simulate 2")
    assert served.returncode == 0, served.stderr
    yield made
    stopped = made.shell("vgpuctl stop")
    assert stopped.returncode == 0, stopped.stderr


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The workload's last line."""
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["event"] == "result"
    return told


def test_eval_of_create(node: Node) -> None:
    told = result(
        node.shell(f'eval "$(vgpuctl create --sm 30 --mem 2G -o env)" && {WORKLOAD}; vgpuctl rm $VGPU_ID >&2')
    )
    assert told["simulated"]
    assert told["total_mem"] == MEMORY_BYTES


def test_a_shell_leaves_its_vgpu(node: Node) -> None:
    """Otherwise its next program has no device, once the vGPU is removed."""
    inside = 'env >before; eval "$(vgpuctl create --sm 30 --mem 2G --name left -o env)"; vgpuctl rm left >&2'
    done = node.shell(f'{inside}; env >between; eval "$(vgpuctl deactivate)"; env >after')
    assert done.returncode == 0, done.stderr
    before, between, after = (
        {line for line in (node.directory / name).read_text().splitlines() if not line.startswith("_=")}
        for name in ("before", "between", "after")
    )
    assert {line.partition("=")[0] for line in between - before} >= {"VGPU_ID", "LD_PRELOAD", "LD_LIBRARY_PATH"}
    assert after == before


def test_exec_in_a_vgpu_by_name(node: Node) -> None:
    told = result(
        node.shell(f"vgpuctl create --sm 30 --mem 2G --name tr >&2 && vgpuctl exec tr -- {WORKLOAD}; vgpuctl rm tr >&2")
    )
    assert told["total_mem"] == MEMORY_BYTES


def test_run_makes_and_removes(node: Node) -> None:
    before = node.ids()
    told = result(node.shell(f"vgpuctl run --sm 30 --mem 2G -- {WORKLOAD} --bytes {2 * MEMORY_BYTES}"))
    assert told["refusals"] == 1
    assert told["bytes_allocated"] <= MEMORY_BYTES
    assert node.ids() == before


def test_an_exported_id_is_enough_once_the_hook_is_installed(node: Node) -> None:
    """The hook alone: the simulated driver takes the place of an installed one, which no vGPU has to name."""
    assert node.shell("vgpuctl hook install").returncode == 0
    created = json.loads(node.shell("vgpuctl create --sm 30 --mem 2G -o json").stdout)
    driver = f"LD_LIBRARY_PATH={ROOT}/cython_ext/lib/sim VGPU_SIM_DIR={created['environment']['VGPU_SIM_DIR']}"
    try:
        alone = result(node.shell(f"{driver} {WORKLOAD}", "bash", "--login"))
        inside = result(node.shell(f"export VGPU_ID={created['vgpu_id']}; {driver} {WORKLOAD}", "bash", "--login"))
    finally:
        node.shell(f"vgpuctl rm {created['vgpu_id']}; vgpuctl hook uninstall")
    assert alone["total_mem"] > MEMORY_BYTES
    assert inside["total_mem"] == MEMORY_BYTES


def test_a_program_with_an_unknown_vgpu_gets_an_error_and_one_line_never_the_whole_gpu(node: Node) -> None:
    script = f'eval "$(vgpuctl create --sm 30 --mem 2G -o env)"; vgpuctl rm $VGPU_ID >&2; {WORKLOAD}'  # gone by then
    done = node.shell(script)
    assert done.returncode != 0
    assert "result" not in done.stdout
    assert "VGPU_ID" in done.stderr or "vgpu-" in done.stderr


def test_two_processes_see_the_same_vgpu_and_ps_lists_them(node: Node) -> None:
    vgpu_id = node.shell("vgpuctl create --sm 50 --mem 2G").stdout.strip()
    command = [
        "/bin/sh",
        "-c",
        f"exec vgpuctl exec {vgpu_id} -- {sys.executable} -m vgpu.workload --seconds 60 -o json",
    ]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=node.directory, env=node.environment, stdout=pipe, text=True) for _ in range(2)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "started"
        listed = json.loads(node.shell("vgpuctl ps -o json").stdout)
        assert {entry["pid"] for entry in listed} == {process.pid for process in running}
        assert {entry["vgpu_id"] for entry in listed} == {vgpu_id}
        assert node.shell(f"vgpuctl rm {vgpu_id}").returncode == Exit.REFUSED
    finally:
        for process in running:
            process.kill()
            process.communicate()
    deadline = time.monotonic() + 30
    while json.loads(node.shell("vgpuctl ps -o json").stdout) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert node.shell(f"vgpuctl rm {vgpu_id}").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # 9 s, and 40 where much else runs
def test_a_stopped_process_gives_way_and_comes_back(node: Node) -> None:
    """SIGSTOP, whether it holds, waits or idles: soon no lease is given to it any more, and its sibling goes on."""
    names = ["stops", "goes"]
    started = []

    def counted(what: str) -> dict[str, int]:
        return {vgpu["name"]: vgpu[what] for vgpu in json.loads(node.shell("vgpuctl ls -o json").stdout)}

    try:
        for name, share in zip(names, (30, 60), strict=True):
            assert node.shell(f"vgpuctl create --sm {share} --mem 2G --gpu 1 --name {name}").returncode == 0
            command = f"exec vgpuctl exec {name} -- {WORKLOAD} --seconds 600"
            process = subprocess.Popen(
                ["/bin/sh", "-c", command], cwd=node.directory, env=node.environment, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "started"
        for _ in range(3):
            seen = counted("tokens")
            eventually(
                lambda seen=seen: all(count > seen[name] + 5 for name, count in counted("tokens").items()), "turns"
            )
            started[0].send_signal(signal.SIGSTOP)

            def sibling_alone() -> bool:
                before, launched = counted("tokens"), counted("launches")
                # Half a second of its kernels, many turns of either. Its lease may be one without an end.
                enough = launched["goes"] + 1000
                eventually(lambda: counted("launches")["goes"] >= enough, "work beside a stopped process")
                return counted("tokens")["stops"] == before["stops"]

            eventually(sibling_alone, "no more leases for a stopped process")
            started[0].send_signal(signal.SIGCONT)
    finally:
        for process in started:
            process.kill()
            process.communicate()
        for name in names:
            node.shell(f"vgpuctl rm --force {name}")


def test_run_is_ended_by_a_signal_and_cleans_up(node: Node) -> None:
    before = node.ids()
    command = ["/bin/sh", "-c", f"exec vgpuctl run --sm 30 --mem 2G -- {WORKLOAD} --seconds 60"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, cwd=node.directory, env=node.environment, stdout=pipe, text=True) as process,
        ended(process),
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "started"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert node.ids() == before


def test_what_does_not_fit_is_refused_with_what_would(node: Node) -> None:
    first = node.shell("vgpuctl create --sm 60 --mem 2G --gpu 0").stdout.strip()
    refused = node.shell("vgpuctl create --sm 60 --mem 2G --gpu 0")
    node.shell(f"vgpuctl rm {first}")
    assert refused.returncode == Exit.REFUSED
    assert refused.stdout == ""
    assert "40" in refused.stderr


def test_what_is_not_there_is_not_found(node: Node) -> None:
    for command in ("inspect vgpu-00000000", "rm nobody", "set nobody --sm 20", "gpu set 9 --mode temporal"):
        assert node.shell(f"vgpuctl {command}").returncode == Exit.NOT_FOUND, command


@pytest.mark.slow
def test_a_second_node_in_the_same_place_is_refused(node: Node) -> None:
    done = node.shell("vgpuctl serve --detach --simulate 1")
    assert done.returncode != 0
    assert "runs already" in done.stderr


def test_a_node_that_cannot_start_says_why(node: Node) -> None:
    place = node.directory / ("long" * 30)
    done = node.shell(f"VGPU_RUNTIME_DIR={place} VGPU_STATE_DIR={place} vgpuctl serve --detach --simulate 1")
    assert done.returncode == Exit.NODE_DOWN
    assert f"vgpuctl: the node did not start: the path {place}/control.sock is too long" in done.stderr


@pytest.mark.parametrize(
    ("place", "variable", "detach"),
    [
        ("bin/vgpuctl", "VGPU_STATE_DIR", ""),
        ("bin/vgpuctl/state", "VGPU_RUNTIME_DIR", "--detach"),
        ("/proc/state", "VGPU_STATE_DIR", "--detach"),
        *(
            pytest.param(place, "VGPU_RUNTIME_DIR", "", marks=pytest.mark.slow)
            for place in ("bin/vgpuctl", "bin/vgpuctl/state", "/proc/state")
        ),
    ],
)
def test_directories_that_cannot_be_used(node: Node, variable: str, place: str, detach: str) -> None:
    other = f"VGPU_RUNTIME_DIR={node.directory}/other VGPU_STATE_DIR={node.directory}/other"
    done = node.shell(f"{other} {variable}={node.directory / place} vgpuctl serve --simulate 1 {detach}")
    assert done.returncode == Exit.NODE_DOWN
    assert "cannot be used: No" in done.stderr  # such file; a directory
    assert done.stderr.endswith(f"\n  → set {variable} to a directory of your own\n")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.slow
def test_a_node_that_serves_no_gpu_says_why(node: Node) -> None:
    other = Node(node.directory / "unserved")
    script = """
        vgpuctl serve --detach --simulate 1 && vgpuctl stop
        for journal in state/GPU-*.sqlite; do seq 9999 > $journal; done
        rm -f state/*-wal state/*-shm
        vgpuctl serve --detach --simulate 1; code=$?
        vgpuctl gpu ls; vgpuctl status
        vgpuctl stop
        exit $code"""
    other.directory.mkdir()
    done = other.shell(f"PATH={node.directory}/bin:$PATH; {script}")
    assert done.returncode == Exit.NODE_DOWN
    assert " serves 1 simulated GPU" in done.stdout.splitlines()[0]
    assert len(re.findall(r"node \d+ serves", done.stdout)) == 1
    started, _, listed = done.stderr.partition("\n")
    assert re.match(
        r"vgpuctl: node \d+ runs, and serves no GPU: GPU 0: its server ended, see .+gpu-0.log: the journal .+$", started
    )
    assert listed.count("vgpuctl: GPU 0 is not served: its server ended, see ") == 2


def test_doctor_sees_the_node(node: Node) -> None:
    findings = json.loads(node.shell("vgpuctl doctor -o json").stdout)["findings"]
    [found] = [finding for finding in findings if finding["check"] == "node"]
    assert found["verdict"] == "ok"
    assert "2 simulated GPUs" in found["found"]


def test_stop_names_who_waits_and_what_ends_that(node: Node) -> None:
    other = Node(node.directory / "stopped")
    other.directory.mkdir()
    script = f"""
        vgpuctl serve --detach --simulate 1 >/dev/null
        vgpuctl run --name trainer --sm 30 --mem 2G -- {sys.executable} -m vgpu.workload --seconds 600 >said 2>&1 &
        until grep -q kernels/s said; do sleep 0.1; done
        vgpuctl ps -o json; echo; echo ---
        vgpuctl stop
        kill $! && vgpuctl serve --detach --simulate 1 >/dev/null; wait; vgpuctl stop"""
    done = other.shell(f"PATH={node.directory}/bin:$PATH; {script}")
    listed, _, said = done.stdout.partition("---\n")
    [program] = json.loads(listed)
    first, second, third, last = said.splitlines()
    assert re.fullmatch(r"node \d+ stopped", first)
    told = f"1 program in 1 vGPU waits until a node serves again: {program['command']} (pid {program['pid']}, trainer)"
    assert second == told
    assert third.startswith("  → vgpuctl serve --detach")
    assert re.fullmatch(r"node \d+ stopped", last)


# --- the demonstration ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limits", [True, False])
def test_the_demonstration_keeps_its_shares_and_without_limits_misses_them(node: Node, limits: bool) -> None:
    options, seconds = ("", 4) if limits else ("--no-limits", 2)  # half and half is far off, however short
    command = f"TMPDIR={node.directory} vgpuctl demo --simulate --duration {seconds}s -o json {options}"
    done = node.shell(command)
    for _ in range(3):  # programs that waited for a processor cannot be measured, and the demonstration says so
        if "try it once more" in done.stderr:
            done = node.shell(command)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["simulated"]
    assert report["mode"] == ("temporal" if limits else "ungated")
    first, second = report["vgpus"]
    assert (first["requested_ratio"], second["requested_ratio"]) == (0.3, 0.7)
    assert first["achieved_ratio"] + second["achieved_ratio"] == pytest.approx(1, abs=0.001)
    missed = abs(first["achieved_ratio"] - 0.3) > 0.03
    assert missed is not limits
    assert done.returncode == (Exit.OK if limits else Exit.FAILURE)
    assert first["memory_refusals"] == (1 if limits else 0)
    assert not list(node.directory.glob("vgpu-demo-*"))


def test_a_detached_run_goes_on_by_itself_and_leaves_its_output(node: Node) -> None:
    begun = node.shell(f"vgpuctl run -d --sm 10 --mem 1G sh -c 'echo in $VGPU_ID; {WORKLOAD}'")
    assert begun.returncode == 0, begun.stderr
    vgpu_id = begun.stdout.strip()
    log = node.directory / "state" / "runs" / f"{vgpu_id}.log"
    assert str(log) in begun.stderr
    waited = node.shell(f"vgpuctl wait {vgpu_id}")
    assert waited.returncode in {0, Exit.NOT_FOUND}, waited.stderr  # the program may have ended before
    eventually(lambda: vgpu_id not in node.ids(), "the vGPU's removal")
    assert f"in {vgpu_id}" in log.read_text()


def test_a_detached_run_that_cannot_begin_says_why(node: Node) -> None:
    begun = node.shell("vgpuctl run -d --sm 10 --mem 900G true")
    assert (begun.returncode, begun.stdout) == (Exit.LAUNCH, "")
    assert "900" in begun.stderr


def test_wait_ends_with_the_programs_of_a_vgpu(node: Node) -> None:
    vgpu_id = node.shell("vgpuctl create --sm 10 --mem 1G").stdout.strip()
    try:
        assert node.shell(f"vgpuctl wait {vgpu_id}").returncode == 0
        script = (
            f"vgpuctl exec {vgpu_id} {sys.executable} -m vgpu.workload --seconds 60 >/dev/null & program=$!; "
            f"until vgpuctl ps -o json {vgpu_id} | grep -q pid; do sleep 0.1; done; "
            f"vgpuctl wait {vgpu_id} --timeout 100ms; echo $?; kill $program; vgpuctl wait {vgpu_id}; echo $?"
        )
        waited = node.shell(script)
        assert waited.stdout.split() == ["1", "0"], waited.stderr
        assert f"programs run in {vgpu_id}" in waited.stderr
    finally:
        node.shell(f"vgpuctl rm -f {vgpu_id}")
