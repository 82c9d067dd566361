"""vgpuctl's side of a node: real supervisor, GPU Servers and brokers, on simulated GPUs."""

from __future__ import annotations

import grp
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.integration import process
from tests.integration.node import SimulatedNode, eventually
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.process_tuning import NICE
from vgpu.protocol.messages import GpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec

GIB = 1 << 30


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(4) as running:
        yield running
        with running.link() as link:
            assert all(gpu.restarts == 0 for gpu in link.gpus())


@pytest.fixture(autouse=True)
def nothing_left(node: SimulatedNode) -> Iterator[None]:
    yield
    with node.link() as link:
        for vgpu in link.list():
            link.remove(vgpu.vgpu_id, force=True)
        for gpu in link.gpus():
            assert (gpu.vgpus, gpu.guaranteed_memory_bytes, gpu.guaranteed_ratio) == (0, 0, 0)


def test_a_created_vgpu_admits_processes_at_once(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent="30", memory_bytes="8G", name="mine")
    assert (vgpu.state, vgpu.name, vgpu.mode, vgpu.simulated) == ("idle", "mine", "temporal", True)
    assert (vgpu.guarantee_ratio, vgpu.limit_ratio, vgpu.memory_limit_bytes) == (0.3, 0.3, 8 * GIB)
    assert vgpu.environment["VGPU_ID"] == vgpu.vgpu_id
    assert vgpu.environment["VGPU_RUNTIME_DIR"] == str(node.paths.runtime)
    child = node.attach(vgpu.vgpu_id, use=False)
    reply = child.replies[0]
    assert reply["vgpu_id"] == vgpu.vgpu_id
    assert (reply["mode"], reply["gpu_uuid"], reply["simulated"]) == ("temporal", vgpu.gpu_uuid, True)
    assert reply["mps_pipe_directory"] == ""
    with node.link() as link:
        shown = link.processes(vgpu.vgpu_id).processes
    assert [(p.pid, p.slot, p.command, p.alive) for p in shown] == [(child.pid, 0, "test", True)]


def test_a_broker_is_small(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    # Private memory alone: what a broker shares with its template is there once for all brokers.
    pages = Path(f"/proc/{vgpu.broker_pid}/smaps_rollup").read_text().splitlines()
    assert sum(int(line.split()[1]) for line in pages if line.startswith("Private_")) <= 10 * 1024  # KiB


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may go first")
def test_servers_and_brokers_go_before_the_programs_that_share_the_gpu(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    assert vgpu.broker_pid is not None
    for pid in (node.server_pid(vgpu.gpu_index), vgpu.broker_pid):
        assert os.getpriority(os.PRIO_PROCESS, pid) == NICE
        group = Path(f"/proc/{pid}/autogroup")  # each has a session of its own, and the kernel may divide by session
        assert not group.exists() or group.read_text().rstrip().endswith("nice -10")


def test_a_program_in_no_vgpu_is_named(node: SimulatedNode) -> None:
    """One that was started without the hook, though its VGPU_ID says otherwise, beside one that is in that vGPU."""
    vgpu = node.create(sm_percent=30, memory_bytes="4G", gpu="0")
    inside = attachment([vgpu])
    outside = inside.environment(node.environment)
    outside["LD_PRELOAD"] = ""
    command = [sys.executable, "-m", "tests.sim.programs", "hold", str(64 << 20)]
    programs = [
        node.popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for env in (outside, inside.environment(node.environment))
    ]

    def seen() -> GpuStatus:
        with node.link() as link:
            return link.gpus()[0]

    try:
        eventually(lambda: seen().outside and seen().processes == 1, "one is seen inside and one outside")
        (found,) = seen().outside
        assert (found.pid, found.uid) == (programs[0].pid, os.getuid())
        assert found.command.startswith("python")
        assert found.memory_bytes > 0
        shown = subprocess.run(
            [sys.executable, "-m", "vgpu.ctl", "ps", "--all"],
            env=node.environment | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        (line,) = [line for line in shown.splitlines() if line.split()[0] == str(programs[0].pid)]
        assert "outside" in line
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    eventually(lambda: not seen().outside, "nobody is outside any more")


def test_a_server_that_hangs_hides_no_other(node: SimulatedNode) -> None:
    """``metrics``, ``ps`` and ``ls`` as they are typed, with their own patience."""
    well, lost = (node.create(str(gpu), sm_percent=30, memory_bytes="1G", name=f"on-{gpu}") for gpu in (0, 1))
    for vgpu in (well, lost):
        node.attach(vgpu.vgpu_id, use=False)
    eventually(lambda: all(seen.processes for v in (well, lost) if (seen := node.reading(v.vgpu_id))), "both run")
    hung = node.server_pid(1)
    os.kill(hung, signal.SIGSTOP)
    try:
        told = vgpuctl(node, "metrics")
        assert 'vgpu_gpu_up{gpu="0"} 1.0' in told.stdout
        assert 'vgpu_gpu_up{gpu="1"} 0.0' in told.stdout
        assert 'vgpu_processes{gpu="0",name="on-0"' in told.stdout
        assert 'vgpu_processes{gpu="1"' not in told.stdout
        listed = vgpuctl(node, "ps")
        assert (listed.stdout.count(well.vgpu_id), listed.stdout.count(lost.vgpu_id)) == (1, 0)
        assert "GPU 1 does not answer" in listed.stderr
        states = {vgpu["vgpu_id"]: vgpu["state"] for vgpu in json.loads(vgpuctl(node, "ls", "-o", "json").stdout)}
        assert states == {well.vgpu_id: "idle", lost.vgpu_id: "restarting"}
        assert node.create("auto", sm_percent=1, memory_bytes="1G").gpu_index != 1
    finally:
        os.kill(hung, signal.SIGCONT)
    eventually(lambda: 'vgpu_gpu_up{gpu="1"} 1.0' in vgpuctl(node, "metrics").stdout, "its answer")
    assert vgpuctl(node, "ps").stdout.count(lost.vgpu_id) == 1


def vgpuctl(node: SimulatedNode, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vgpu.ctl", *words]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.OK, done.stderr
    return done


def test_new_vgpus_go_where_most_room_is(node: SimulatedNode) -> None:
    placed = [node.create(sm_percent=60, memory_bytes="1G").gpu_index for _ in range(4)]
    assert sorted(placed) == [0, 1, 2, 3]
    with pytest.raises(VgpuError) as refused:
        node.create(sm_percent=60, memory_bytes="1G")
    assert refused.value.code is ErrorCode.NO_ROOM
    assert "none of 4 GPUs" in refused.value.message
    assert "--sm 40" in refused.value.hint
    assert node.create(sm_percent=40, memory_bytes="1G", gpu="2").gpu_index == 2


def test_a_gpu_is_named_by_index_or_uuid(node: SimulatedNode) -> None:
    with node.link() as link:
        uuids = [gpu.uuid for gpu in link.gpus()]
    assert node.create(sm_percent=10, memory_bytes="1G", gpu="3").gpu_index == 3
    assert node.create(sm_percent=10, memory_bytes="1G", gpu=uuids[1].upper()).gpu_index == 1
    assert node.create(sm_percent=10, memory_bytes="1G", gpu=uuids[2][4:14]).gpu_index == 2
    with pytest.raises(VgpuError, match="no GPU '9'"):
        node.create(sm_percent=10, memory_bytes="1G", gpu="9")


def test_memory_is_promised_once(node: SimulatedNode) -> None:
    with node.link() as link:
        total = link.gpus()[0].total_memory_bytes
    node.create(gpu="0", sm_percent=10, memory_bytes=total - 4 * GIB)
    with pytest.raises(VgpuError) as refused:
        node.create(gpu="0", sm_percent=10, memory_bytes="5G")
    assert refused.value.code is ErrorCode.NO_ROOM
    assert "--mem 4096M" in refused.value.hint


def test_names_prefixes_and_strangers(node: SimulatedNode) -> None:
    first = node.create(sm_percent=10, memory_bytes="1G", name="one", gpu="0")
    with pytest.raises(VgpuError) as taken:
        node.create(sm_percent=10, memory_bytes="1G", name="one", gpu="1")
    assert taken.value.code is ErrorCode.EXISTS
    with node.link() as link:
        assert link.inspect("one").vgpu.vgpu_id == first.vgpu_id
        assert link.inspect(first.vgpu_id[5:11]).vgpu.vgpu_id == first.vgpu_id
        with pytest.raises(VgpuError) as unknown:
            link.inspect("other")
    assert unknown.value.code is ErrorCode.NOT_FOUND


def test_set_changes_what_the_processes_see(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="8G", gpu="0")
    node.create(sm_percent=50, memory_bytes="8G", gpu="0")
    child = node.attach(vgpu.vgpu_id, use=False)
    assert child.replies[0]["sm_percent"] == 30
    with node.link() as link:
        changed = link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=50, memory_bytes="2G", burst=True))
        assert (changed.guarantee_ratio, changed.limit_ratio, changed.memory_limit_bytes) == (0.5, 1.0, 2 * GIB)
        with pytest.raises(VgpuError) as refused:
            link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=60))
        assert refused.value.code is ErrorCode.NO_ROOM
        assert link.inspect(vgpu.vgpu_id).vgpu.guarantee_ratio == 0.5
    assert node.attach(vgpu.vgpu_id, use=False).replies[0]["sm_percent"] == 50


def test_a_vgpu_in_use_is_removed_by_force_only(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="8G")
    child = node.attach(vgpu.vgpu_id)
    eventually(lambda: child.epochs, "its first lease")
    with node.link() as link:
        with pytest.raises(VgpuError) as refused:
            link.remove(vgpu.vgpu_id)
        assert refused.value.code is ErrorCode.IN_USE
        assert str(child.pid) in refused.value.message
        link.remove(vgpu.vgpu_id, force=True)
        assert link.list() == ()
    assert not node.paths.vgpu_dir(vgpu.vgpu_id).exists()
    assert child.popen.poll() is None, "a process is never killed with its vGPU"


def test_a_vgpu_leaves_when_its_time_is_up(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="8G", ttl_ns="1500ms")
    assert vgpu.expires_unix_s is not None
    eventually(lambda: node.reading(vgpu.vgpu_id) is None, "its expiry")


def held_ns(node: SimulatedNode) -> dict[str, int]:
    with node.link() as link:
        return {vgpu.vgpu_id: vgpu.held_ns for vgpu in link.list()}


def test_two_sharers_get_what_was_promised(node: SimulatedNode) -> None:
    """Coarse on purpose: that the whole chain is connected the right way round. The demo and the benchmarks measure."""
    small = node.create(sm_percent=20, memory_bytes="1G", gpu="0")
    large = node.create(sm_percent=80, memory_bytes="1G", gpu="0")
    children = [node.attach(small.vgpu_id), node.attach(large.vgpu_id)]
    for child in children:
        eventually(lambda child=child: child.epochs, "the first lease")
    before = held_ns(node)  # one of them was alone until now
    for child in children:
        eventually(lambda child=child: len(child.epochs) >= 30, "thirty leases")

    def small_part() -> float:
        held = {vgpu_id: after - before[vgpu_id] for vgpu_id, after in held_ns(node).items()}
        return held[small.vgpu_id] / sum(held.values())

    eventually(lambda: 0.1 < small_part() < 0.3, "a fifth is the smaller one's")
    with node.link() as link:
        for vgpu in link.list():
            assert vgpu.tokens > 20
            assert vgpu.processes == 1


def test_watching(node: SimulatedNode) -> None:
    with node.link() as watcher:
        notices = watcher.watch(snapshots=True, events=True, interval_ns=50_000_000)
        first = next(notices)
        assert first.snapshot is not None
        assert len(first.snapshot.gpus) == 4
        vgpu = node.create(sm_percent=30, memory_bytes="8G")
        kinds = set()
        for notice in notices:
            if notice.event is not None and notice.event.vgpu_id == vgpu.vgpu_id:
                kinds.add(notice.event.kind)
            if notice.snapshot is not None and kinds and notice.snapshot.vgpus:
                break
        assert kinds == {"created"}


def test_an_unknown_field_is_refused_and_the_link_goes_on(node: SimulatedNode) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(node.paths.control_socket))

        def ask(**message: object) -> dict[str, object]:
            body = msgpack.packb(message)
            link.sendall(struct.pack("<I", len(body)) + body)
            size = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")
            answer = msgpack.unpackb(link.recv(size, socket.MSG_WAITALL))
            assert isinstance(answer, dict)
            return answer

        assert ask(op="hello", id=1, version=1, oldest_version=1, role="control")["ok"]
        refused = ask(op="create", id=2, spec={"sm_percent": 30, "turbo": True})
        assert (refused["ok"], refused["code"], refused["id"]) == (False, "invalid", 2)
        assert "turbo" in str(refused["error"])
        assert ask(op="status", id=3)["ok"]


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\x7f", b"\x03\0\0\0abc", b"\x01\0\0\0\x90", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_garbage_ends_that_link_alone(node: SimulatedNode, garbage: bytes) -> None:
    with node.link() as good, socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(30)
        bad.connect(str(node.paths.control_socket))
        bad.sendall(garbage)
        with bad.makefile("rb") as stream:
            stream.read()  # to its end: the node closed it
        assert good.status().pid == node.supervisor.pid


def test_a_version_without_overlap_is_told_so(node: SimulatedNode) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(node.paths.control_socket))
        body = msgpack.packb({"op": "hello", "id": 1, "version": 99, "oldest_version": 90, "role": "control"})
        link.sendall(struct.pack("<I", len(body)) + body)
        with link.makefile("rb") as stream:
            answer = msgpack.unpackb(stream.read()[4:])
    assert (answer["ok"], answer["code"]) == (False, "version")


def test_only_one_node_serves_a_directory(node: SimulatedNode) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "vgpu.node", "--simulate", "1"],
        env=node.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == Exit.REFUSED
    assert second.stderr.startswith("vgpuctl: a node runs already in ")
    assert "\n  → stop it: vgpuctl stop" in second.stderr


@pytest.mark.slow
def test_gpus_that_are_not_chosen_are_left_alone() -> None:
    with SimulatedNode(3, "temporal", "--gpu", "2", "--gpu", "0", "--gpu", "2") as node:
        with node.link() as link:
            assert [gpu.index for gpu in link.gpus()] == [0, 2]
            with pytest.raises(VgpuError, match="there is no GPU '1'; this node has GPU 0, 2"):
                link.create(VgpuSpec.parse(sm_percent=10, memory_bytes="1G"), "1")
        made = [node.create(sm_percent=60, memory_bytes="1G") for _ in range(2)]
        assert [vgpu.gpu_index for vgpu in made] == [0, 2]
        assert not node.paths.server_socket(1).exists()
        assert node.attach(made[1].vgpu_id, use=False).replies[0]["gpu_uuid"] == made[1].gpu_uuid


@pytest.mark.parametrize(("count", "here"), [("1", "GPU 0 alone"), ("2", "GPUs 0 to 1")])
def test_a_gpu_that_is_not_there_is_not_served(tmp_path: Path, count: str, here: str) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "vgpu.ctl", "serve", "--simulate", count, "--gpu", "0", "--gpu", "3"],
        env=os.environ | {"VGPU_RUNTIME_DIR": str(tmp_path / "run"), "VGPU_STATE_DIR": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == Exit.NOT_FOUND
    assert refused.stderr == f"vgpuctl: there is no GPU 3\n  → this machine has {here}\n"


def test_directories_let_in_whom_they_should(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)  # noqa: E731
    assert mode(node.paths.gpu_dir(0)) == 0o700
    assert mode(node.paths.server_socket(0)) == 0o600
    assert mode(node.paths.state) == 0o700
    assert mode(node.paths.broker_socket(vgpu.vgpu_id)) == 0o600
    shared = os.geteuid() == 0
    assert mode(node.paths.control_socket) == (0o666 if shared else 0o600)
    assert mode(node.paths.vgpu_dir(vgpu.vgpu_id)) == 0o711


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_other_users_may_look_but_not_touch(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    node.directory.chmod(0o755)

    def stranger() -> list[str]:
        said = []
        with node.link() as link:
            said += [shown.vgpu_id for shown in link.list()]
            try:
                link.remove(vgpu.vgpu_id, force=True)
            except VgpuError as error:
                said.append(error.code)
            own = link.create(VgpuSpec.parse(sm_percent=5, memory_bytes="1G"))
            reply, _ = process.knock(node.paths.broker_socket(own.vgpu_id), process.attach_request())
            said += [str(own.owner_uid), str(reply["ok"])]
        try:
            process.knock(node.paths.broker_socket(vgpu.vgpu_id), process.attach_request())
        except PermissionError:
            said.append("kept out")
        return said

    assert as_nobody(stranger) == [vgpu.vgpu_id, "not-yours", "65534", "True", "kept out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_group_shares_a_vgpu_that_is_shared_with_it(node: SimulatedNode) -> None:
    """A user belongs to most of its groups by /etc/group, and they are none of its primary one."""
    (shared,) = [group for group in grp.getgrall() if group.gr_name == "users"]
    vgpu = node.create(sm_percent=10, memory_bytes="1G", share_group=shared.gr_name)
    node.directory.chmod(0o755)

    def attaches() -> list[str]:
        try:
            reply, _ = process.knock(node.paths.broker_socket(vgpu.vgpu_id), process.attach_request())
        except PermissionError:
            return ["kept out"]
        return [str(reply["ok"])]

    assert as_nobody(attaches) == ["kept out"]
    assert as_nobody(attaches, groups=[70_000, shared.gr_gid]) == ["True"]


def as_nobody(act: Callable[[], list[str]], groups: Sequence[int] = ()) -> list[str]:
    """What ``act`` says as uid 65534, who is in ``groups`` besides. A fork, not a program: that user may not even reach
    the interpreter."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(list(groups))
            os.setgid(65534)
            os.setuid(65534)
            said = act()
        except BaseException as error:
            said = [repr(error)]
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = json.load(pipe)
    os.waitpid(child, 0)
    assert isinstance(said, list)
    return said


@pytest.mark.parametrize("why", ["a group", "no room", "a process"])
def test_a_mode_that_is_refused_changes_nothing(node: SimulatedNode, why: str) -> None:
    fields: dict[str, Any] = {"memory_bytes": "1G", "sm_percent": 30}
    if why == "a group":
        fields["group"] = "ranks"
    # In turns they fit to the last percent; of the SMs no two of them fit at once, and rounds need some room.
    wide = {"sm_percent": 51, "quota_request_percent": 65, "quota_limit_percent": 65}
    several = [fields | wide] * 3 if why == "no room" else [fields]
    made = [node.create(gpu="1", **each) for each in several]
    child = node.attach(made[0].vgpu_id) if why == "a process" else None
    with node.link() as link:
        before = link.gpus()[1]
        with pytest.raises(VgpuError) as refused:
            link.set_gpu("1", mode="spatial", period_ns=80_000_000, window_ns=6_000_000)
        after = link.gpus()[1]
        assert refused.value.code in {ErrorCode.MODE, ErrorCode.NO_ROOM, ErrorCode.IN_USE}
        assert (after.mode, after.mode_reason, after.mps_pid) == (before.mode, before.mode_reason, None)
        assert (after.period_ns, after.window_ns) == (before.period_ns, before.window_ns)
    assert not simulated_daemons(node)
    if child is not None:
        child.kill()


def simulated_daemons(node: SimulatedNode) -> list[Path]:
    return list(Path(node.environment["VGPU_RUNTIME_DIR"]).rglob("simulated-mps"))


def test_the_mode_changes_while_nobody_is_attached(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="8G", gpu="1")
    with node.link() as link:
        gpu = link.set_gpu("1", mode="spatial")
        assert (gpu.mode, gpu.mode_reason) == ("spatial", "asked for")
        shown = link.inspect(vgpu.vgpu_id)
        assert round(shown.vgpu.sm_percent_granted, 1) == 30.3
        assert (shown.vgpu.guarantee_ratio, shown.vgpu.limit_ratio) == (1.0, 1.0)
        assert any("40 of 132 SMs" in note for note in shown.notes)
        child = node.attach(vgpu.vgpu_id)
        assert child.replies[0]["mps_active_thread_percentage"] == "30.31"
        assert child.replies[0]["mps_pinned_memory_limit"] == "0=8192M"
        assert child.replies[0]["mps_client_priority"] == "0"
        eventually(lambda: child.epochs, "a lease in spatial mode")
        with pytest.raises(VgpuError) as refused:
            link.set_gpu("1", mode="temporal")
        assert refused.value.code is ErrorCode.IN_USE
        child.kill()
        eventually(lambda: not link.processes(vgpu.vgpu_id).processes, "the end of the process")
        back = link.set_gpu("1", mode="temporal")
        assert (back.mode, back.mode_reason) == ("temporal", "asked for")


def test_a_mode_that_nobody_asked_for_is_the_default() -> None:
    with SimulatedNode() as fresh, fresh.link() as link:
        (gpu,) = link.gpus()
        assert (gpu.mode, gpu.mode_reason) == ("temporal", "the default")
