"""What resumes a suspended vGPU by itself, on a simulated node: a CUDA call, a connection to a port, a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import vgpu
from tests.integration.fixtures import nodes, started
from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from tests.integration.worker import GIB, Spoken, on_gpu, state
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import EventReading, VgpuStatus
from vgpu.spec import VgpuChanges

SERVER = """
import socket, sys, threading
from ctypes import c_uint64, c_void_p, byref
from tests.hook.app import App
listener = socket.create_server(("", 0) if "6" not in sys.argv[2:] else ("::", 0),
    family=socket.AF_INET6 if "6" in sys.argv[2:] else socket.AF_INET, dualstack_ipv6="6" in sys.argv[2:])
app = App()
block = app.allocate(int(sys.argv[1]))
app.call("cuMemsetD8_v2", c_uint64(block), 7, 4096)
app.synchronize()
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
def serve():
    app.call("cuCtxSetCurrent", context)
    while True:
        connection, _ = listener.accept()
        with connection:
            asked = connection.recv(100)
            if asked == b"health":
                connection.sendall(b"alive")
            elif asked:
                connection.sendall(b"intact" if app.read(block, 4096) == bytes([7]) * 4096 else b"lost")
threading.Thread(target=serve, daemon=True).start()
print("started", flush=True)
print(listener.getsockname()[1], flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Server(Spoken):
    """A TCP server with memory on the GPU: it answers whether that is as it was."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, memory_bytes: int = GIB, *how: str) -> None:
        super().__init__(node, vgpu, SERVER, str(memory_bytes), *how)
        self.port = int(self.heard())

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection((host, self.port), PATIENCE_S)

    def does(self, line: str) -> None:
        self.say(line)
        assert self.heard() == "done"


def answer(connection: socket.socket, asks: bytes = b"weights") -> bytes:
    connection.sendall(asks)
    return connection.recv(100)


shared, node = nodes(2)
programs = started("programs")


@pytest.fixture
def made(node: SimulatedNode, programs: list[Spoken]) -> tuple[VgpuStatus, Server]:
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    server = Server(node, vgpu)
    programs.append(server)
    return vgpu, server


def suspend(node: SimulatedNode, vgpu: VgpuStatus, *resume_on: str, at_unix_s: float | None = None) -> VgpuStatus:
    with node.link() as link:
        suspended = link.suspend(vgpu.vgpu_id, resume_on, at_unix_s)
    assert suspended.state == "suspended"
    assert (suspended.resume_on, suspended.resume_at_unix_s) == (resume_on, at_unix_s)
    return suspended


def events(node: SimulatedNode, vgpu: VgpuStatus, kind: str = "resumed") -> list[EventReading]:
    with node.link() as link:
        return list(link.events(vgpu.vgpu_id, kinds=(kind,)))


def newest(node: SimulatedNode, vgpu: VgpuStatus) -> EventReading:
    with node.link() as link:
        return link.events(vgpu.vgpu_id, kinds=("suspended", "resumed"))[-1]


def comes_back(node: SimulatedNode, vgpu: VgpuStatus, *causes: str) -> EventReading:
    eventually(lambda: state(node, vgpu) in {"idle", "waiting", "running"}, "it is resumed")
    last = eventually(lambda: (found := newest(node, vgpu)).kind == "resumed" and found, "the event")
    assert last.fields["cause"] in causes, last
    return last


def stays(node: SimulatedNode, vgpu: VgpuStatus, wanted: str = "suspended") -> None:
    """As long as the server takes to look a few times: it looks every 25 ms."""
    before = len(events(node, vgpu))
    time.sleep(0.5)
    assert state(node, vgpu) == wanted
    assert len(events(node, vgpu)) == before


def test_a_connection(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}")
    assert not sum(on_gpu(node).values())
    stays(node, vgpu)
    with closing(server.connect()) as connection:
        event = comes_back(node, vgpu, "connection")  # before the program has made a CUDA call
        assert f"a connection to port {server.port}" in event.text
        assert answer(connection) == b"intact"
    assert node.reading(vgpu.vgpu_id).resume_on == ()
    assert sum(on_gpu(node).values()) > GIB


def test_connections_from_before_do_not_count(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    """Nor do those of other programs, to another port."""
    vgpu, server = made
    with closing(server.connect()) as before, closing(socket.create_server(("127.0.0.1", 0))) as other:
        suspend(node, vgpu, f"tcp:{server.port}")
        with closing(socket.create_connection(other.getsockname(), PATIENCE_S)):
            stays(node, vgpu)
        before.sendall(b"weights")
        stays(node, vgpu)  # its call waits
        with closing(server.connect()):
            comes_back(node, vgpu, "connection")
        assert before.recv(100) == b"intact"


def test_a_listener_of_another_program_does_not_count(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    """Its address is more exact than the server's: the kernel gives it the connections to that address."""
    vgpu, server = made
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.2", 0))
        other.listen()
        port = other.getsockname()[1]
        server.does(f"wide = socket.create_server(('127.0.0.1', {port}))")
        suspend(node, vgpu, f"tcp:{port}")
        with closing(socket.create_connection(("127.0.0.2", port), PATIENCE_S)):
            stays(node, vgpu)
        with closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)):
            comes_back(node, vgpu, "connection")


def test_a_port_on_which_nothing_listens(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    with closing(socket.create_server(("127.0.0.1", 0))) as other, node.link() as link:
        port = other.getsockname()[1]  # one that is not in the vGPU
        with pytest.raises(VgpuError) as refused:
            link.suspend(vgpu.vgpu_id, [f"tcp:{port}"])
    assert refused.value.code is ErrorCode.INVALID
    assert refused.value.message == (
        f"no process of {vgpu.vgpu_id} listens on port {port}: its processes listen on {server.port} "
        f"(process {server.popen.pid})"
    )
    assert refused.value.hint == f"vgpuctl suspend {vgpu.vgpu_id} --resume-on tcp:{server.port}"
    assert state(node, vgpu) == "idle"
    server.does("listener.shutdown(socket.SHUT_RDWR)")
    with node.link() as link, pytest.raises(VgpuError, match="nor on another TCP port") as refused:
        link.suspend(vgpu.vgpu_id, [f"tcp:{port}"])
    assert "start the server in the vGPU first" in refused.value.hint


def test_what_can_never_be_is_refused(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="4G")
    with node.link() as link:
        for triggers, at_unix_s, says in (
            (["tcp:8000"], None, "nor on another TCP port"),
            (["udp:8000"], None, "is no trigger"),
            (["tcp:65536"], None, "is no trigger"),
            ([], 1.0, "is past"),
        ):
            with pytest.raises(VgpuError, match=says) as refused:
                link.suspend(vgpu.vgpu_id, triggers, at_unix_s)
            assert refused.value.code is ErrorCode.INVALID
            assert refused.value.hint
    assert state(node, vgpu) == "idle"


def test_a_call(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, "call")
    with closing(server.connect()) as connection:
        assert answer(connection, b"health") == b"alive"
        stays(node, vgpu)  # that was no CUDA call
    server.does("assert app.read(block, 4096) == bytes([7]) * 4096")
    comes_back(node, vgpu, "call")


@pytest.mark.slow
def test_a_time_and_a_call_that_waits_for_it(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    at = time.time() + 3
    suspend(node, vgpu, at_unix_s=at)
    server.say("assert app.read(block, 4096) == bytes([7]) * 4096")
    comes_back(node, vgpu, "time")
    assert time.time() >= at
    assert server.heard() == "done"


@pytest.mark.slow
def test_restarted_servers_know_what_it_waits_for(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    """A connection that is made while none runs is noticed by the next."""
    vgpu, server = made
    with closing(server.connect()):
        at = time.time() + 3600
        suspend(node, vgpu, "call", f"tcp:{server.port}", at_unix_s=at)
        for broker_too in (False, True):
            restart(node, vgpu, broker_too=broker_too)
            reading = node.reading(vgpu.vgpu_id)
            assert (reading.resume_on, reading.resume_at_unix_s) == (("call", f"tcp:{server.port}"), at)
            stays(node, vgpu)
        pid = node.server_pid()
        os.kill(pid, signal.SIGKILL)
        with closing(server.connect()):
            eventually(lambda: node.server_pid() != pid, "another server runs")
            comes_back(node, vgpu, "connection")
    suspend(node, vgpu, at_unix_s=time.time() + 3)
    os.kill(node.server_pid(), signal.SIGKILL)
    eventually(lambda: node.reading(vgpu.vgpu_id), "the vGPU is back")
    comes_back(node, vgpu, "time")
    server.does("assert app.read(block, 4096) == bytes([7]) * 4096")


def restart(node: SimulatedNode, vgpu: VgpuStatus, *, broker_too: bool) -> None:
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    server = node.server_pid()
    if broker_too:
        assert reading.broker_pid
        os.kill(reading.broker_pid, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    eventually(lambda: node.server_pid() != server, "another server runs")
    eventually(lambda: state(node, vgpu) == "suspended", "it stays suspended")


def test_two_triggers_at_once_resume_it_once(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, "call", f"tcp:{server.port}")
    with closing(server.connect()) as connection, closing(server.connect()) as second:
        server.say("assert app.read(block, 4096) == bytes([7]) * 4096")
        assert answer(connection) == b"intact"
        assert answer(second) == b"intact"
        assert server.heard() == "done"
    comes_back(node, vgpu, "connection", "call")
    assert len(events(node, vgpu)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_program_that_ends(node: SimulatedNode, made: tuple[VgpuStatus, Server], how: str) -> None:
    """Its exit handlers call the driver. After a kill the next program resumes the vGPU."""
    vgpu, server = made
    if how == "kill":
        suspend(node, vgpu, f"tcp:{server.port}")
        server.popen.kill()
        eventually(lambda: node.reading(vgpu.vgpu_id).processes == 0, "it is gone")
        eventually(lambda: any("listens on port" in text for text in warnings(node, vgpu)), "the warning is shown")
        stays(node, vgpu)
    else:
        server.does("import atexit; atexit.register(lambda: app.call('cuCtxSynchronize'))")
        suspend(node, vgpu, "call", f"tcp:{server.port}")
        server.say("sys.exit(3)")
        assert server.popen.wait(PATIENCE_S) == 3
        comes_back(node, vgpu, "call", "end")
    again = Server(node, vgpu)
    try:
        comes_back(node, vgpu, *(["start"] if how == "kill" else ["call", "end"]))
        suspend(node, vgpu, f"tcp:{again.port}")
        with closing(again.connect()) as connection:
            assert answer(connection) == b"intact"
    finally:
        again.end()


@pytest.mark.parametrize("trigger", ["call", "tcp"])
def test_a_program_that_starts(node: SimulatedNode, made: tuple[VgpuStatus, Server], trigger: str) -> None:
    """Its first call waits until the vGPU is back. Without such a trigger it is refused, as ever."""
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}" if trigger == "tcp" else trigger)
    second = Server(node, vgpu)
    try:
        comes_back(node, vgpu, "start")
        for one in (server, second):
            one.does("assert app.read(block, 4096) == bytes([7]) * 4096")
    finally:
        second.end()


def test_a_killed_program_with_a_time_stays_suspended(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, at_unix_s=time.time() + 3600)
    server.popen.kill()
    eventually(lambda: node.reading(vgpu.vgpu_id).processes == 0, "it is gone")
    stays(node, vgpu)


@pytest.mark.slow
def test_a_server_that_listens_in_another_process(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Which makes no CUDA call itself: it only names the vGPU. It begins to listen anew while the vGPU is suspended."""
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    engine = Server(node, vgpu)
    body = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("started", flush=True)
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
    front = Spoken(node, vgpu, body, "0")
    programs += [engine, front]
    port = int(front.heard())
    suspend(node, vgpu, f"tcp:{port}")
    front.end()
    again = Spoken(node, vgpu, body, str(port))
    programs.append(again)
    stays(node, vgpu)
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)):
        comes_back(node, vgpu, "connection")
    suspend(node, vgpu, f"tcp:{port}")
    again.end()
    engine.end()
    eventually(lambda: any("listens on port" in text for text in warnings(node, vgpu)), "the warning is shown")
    last = Spoken(node, vgpu, body, str(port))
    programs.append(last)
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)):
        comes_back(node, vgpu, "connection")


def warnings(node: SimulatedNode, vgpu: VgpuStatus) -> tuple[str, ...]:
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    return reading.warnings


@pytest.mark.slow
def test_no_room_for_now(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    """Others were promised its place: the connection waits until there is room, and one event has the reason."""
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}")
    other = node.create("0", sm_percent=90, memory_bytes="100G")
    with closing(server.connect()) as connection:
        eventually(lambda: any("brought back" in text for text in warnings(node, vgpu)), "the warning is shown")
        refused = events(node, vgpu, "not-resumed")
        assert len(refused) == 1
        assert refused[0].fields["cause"] == "connection"
        assert state(node, vgpu) == "suspended"
        with node.link() as link:
            link.remove(other.vgpu_id)
        assert answer(connection) == b"intact"
    comes_back(node, vgpu, "connection")
    assert not warnings(node, vgpu)


@pytest.mark.slow
def test_a_client_that_gives_up_before_there_is_room(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}")
    other = node.create("0", sm_percent=90, memory_bytes="100G")
    connection = server.connect()
    eventually(lambda: any("brought back" in text for text in warnings(node, vgpu)), "the warning is shown")
    connection.close()  # the server reads the end of it, and closes its own
    eventually(lambda: not warnings(node, vgpu), "it waits for no room any more")
    with node.link() as link:
        link.remove(other.vgpu_id)
    stays(node, vgpu)
    with closing(server.connect()) as connection:
        assert answer(connection) == b"intact"


def test_what_is_said_last_holds(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}")
    suspend(node, vgpu)  # for good
    with closing(server.connect()):
        stays(node, vgpu)
    suspend(node, vgpu, f"tcp:{server.port}")
    with closing(server.connect()):
        comes_back(node, vgpu, "connection")
    suspend(node, vgpu, f"tcp:{server.port}")
    with node.link() as link:
        assert link.resume(vgpu.vgpu_id).resume_on == ()
    assert comes_back(node, vgpu, "request")


@pytest.mark.slow
def test_it_waits_on_another_gpu(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, f"tcp:{server.port}")
    with node.link() as link:
        moved = link.migrate(vgpu.vgpu_id, "1")
        assert (moved.gpu_index, moved.state, moved.resume_on) == (1, "suspended", (f"tcp:{server.port}",))
    with closing(server.connect()) as connection:
        assert answer(connection) == b"intact"
    comes_back(node, moved, "connection")


@pytest.mark.slow
def test_removed_meanwhile(node: SimulatedNode, made: tuple[VgpuStatus, Server]) -> None:
    vgpu, server = made
    suspend(node, vgpu, "call", f"tcp:{server.port}")
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    assert node.reading(vgpu.vgpu_id) is None
    with closing(server.connect()) as connection:
        assert answer(connection, b"health") == b"alive"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare makes network namespaces")
def test_in_a_network_namespace_of_its_own(node: SimulatedNode, programs: list[Spoken]) -> None:
    """As in a container: its port is its own, whatever has the same one on the host."""
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    body = "import subprocess; subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n" + SERVER
    pipe = subprocess.PIPE
    environment = attachment([vgpu]).environment(node.environment)
    popen = node.popen(
        ["unshare", "-n", sys.executable, "-c", body, str(GIB)], env=environment, stdin=pipe, stdout=pipe
    )
    assert popen.stdout is not None
    assert popen.stdin is not None
    first = popen.stdout.readline()
    if not first:
        pytest.skip("this user may not make a network namespace")
    assert first == "started\n"
    port = int(popen.stdout.readline())
    suspend(node, vgpu, f"tcp:{port}")
    same = socket.create_server(("127.0.0.1", port))
    with closing(same), closing(socket.create_connection(same.getsockname(), PATIENCE_S)):
        stays(node, vgpu)
    popen.stdin.write(f"client = socket.create_connection(('127.0.0.1', {port}))\n")
    popen.stdin.flush()
    comes_back(node, vgpu, "connection")


@pytest.mark.slow
def test_an_ipv6_listener_gets_connections_of_both_kinds(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    server = Server(node, vgpu, GIB, "6")
    programs.append(server)
    for host in ("127.0.0.1", "::1"):
        suspend(node, vgpu, f"tcp:{server.port}")
        with closing(server.connect(host)) as connection:
            comes_back(node, vgpu, "connection")
            assert answer(connection) == b"intact"


@pytest.mark.slow
def test_idle_suspended_it_comes_back_with_a_connection(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    server = Server(node, vgpu)
    programs.append(server)
    changes = VgpuChanges.parse(idle_suspend_ns="1s", resume_on=f"tcp:{server.port}")
    with node.link() as link:
        assert link.set(vgpu.vgpu_id, changes).spec.resume_on == (f"tcp:{server.port}",)
    for restarts in (False, True):
        eventually(lambda: state(node, vgpu) == "idle-suspended", "it is suspended while idle")
        eventually(lambda: sum(on_gpu(node).values()) == 0, "it has nothing on the GPU")
        if restarts:
            pid = node.server_pid()
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: node.server_pid() != pid, "another server runs")
            eventually(lambda: state(node, vgpu) == "idle-suspended", "it stays so")
        assert node.reading(vgpu.vgpu_id).resume_on == ("call", f"tcp:{server.port}")
        with closing(server.connect()) as connection:
            comes_back(node, vgpu, "connection")
            assert answer(connection) == b"intact"
    eventually(lambda: state(node, vgpu) == "idle-suspended", "it is suspended while idle")
    server.does("assert app.read(block, 4096) == bytes([7]) * 4096")
    comes_back(node, vgpu, "call")
    with node.link() as link:
        assert link.set(vgpu.vgpu_id, VgpuChanges.parse(resume_on="off")).spec.resume_on == ()
    eventually(lambda: state(node, vgpu) == "idle-suspended", "it is suspended while idle")
    with closing(server.connect()):
        stays(node, vgpu, "idle-suspended")
        with node.link() as link:
            link.set(vgpu.vgpu_id, VgpuChanges.parse(resume_on="tcp:1"))
        eventually(lambda: any("listens on port 1," in text for text in warnings(node, vgpu)), "the warning is shown")


@pytest.mark.slow
def test_swapped_memory_comes_with_the_connection(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Not only with the first call after it."""
    vgpu = node.create("0", sm_percent=30, memory_bytes="2G", oversubscribe="swap")
    server = Server(node, vgpu, 80 << 20)
    programs.append(server)
    suspend(node, vgpu, f"tcp:{server.port}")
    eventually(lambda: node.reading(vgpu.vgpu_id).memory_away_bytes >= 80 << 20, "it is away")
    with closing(server.connect()) as connection:
        comes_back(node, vgpu, "connection")
        eventually(lambda: node.reading(vgpu.vgpu_id).memory_away_bytes == 0, "it is on the card")
        assert answer(connection) == b"intact"


@contextmanager
def node_here(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VGPU_RUNTIME_DIR", "VGPU_STATE_DIR"):
        monkeypatch.setenv(name, node.environment[name])
    yield


@pytest.mark.slow
def test_the_commands_and_the_python_interface(
    node: SimulatedNode, made: tuple[VgpuStatus, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, server = made

    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "vgpu.ctl", *words]
        return subprocess.run(argv, env=node.environment, capture_output=True, text=True, check=False)

    ran = ctl(
        "suspend",
        status.vgpu_id,
        "--resume-on",
        f"TCP:{server.port}",
        "--resume-on",
        "call",
        "--resume-at",
        "90m",
        "-o",
        "json",
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["resume_on"] == ["call", f"tcp:{server.port}"]
    assert told["resume_at_unix_s"] > time.time() + 3600
    assert f"a CUDA call, a connection to port {server.port} or 20" in ctl("inspect", status.vgpu_id).stdout
    assert f"call, tcp:{server.port}, 20" in ctl("ls", "-o", "wide").stdout
    why = ctl("why", status.vgpu_id).stdout
    assert f"a connection to port {server.port}" in why
    with closing(server.connect()) as connection:
        assert answer(connection) == b"intact"
    assert "a connection to port" in ctl("events", status.vgpu_id).stdout
    past = ctl("suspend", status.vgpu_id, "--resume-at", "2020-01-01")
    assert past.returncode != 0
    assert "is past" in past.stderr
    with node_here(node, monkeypatch):
        found = vgpu.connect(status.vgpu_id)
        found.suspend(resume_on=[f"tcp:{server.port}", "call"], resume_at="08:30")
        assert found.reading["resume_on"] == ["call", f"tcp:{server.port}"]
        found.resume()
        with pytest.raises(VgpuError, match="listens on port 1"):
            found.suspend(resume_on="tcp:1")
        with pytest.raises(VgpuError, match="is no trigger"):
            found.suspend(resume_on="8000")
