"""A node in miniature: simulated GPU, dispatcher and relay threads are the real ones; the broker's half of the attach
conversation and the scheduler are played by the test, which publishes leases by script."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

import cython_ext
from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.pages.storepage import StorePage
from cython_ext.readings import Event, EventKind, PageMode, SlotReading
from cython_ext.relay.relay import Relay
from cython_ext.simengine import create_gpus
from vgpu.protocol.peer import start_time

LIBRARIES = Path(cython_ext.__file__).parent / "lib"
HOOK = LIBRARIES / "libvgpu_hook.so"
MS = 1_000_000
GIB = 1 << 30
PATIENCE_S = 60.0
ALWAYS_NS = 1 << 62
"""``GrantsPage.implicit_ns`` of a server that has looked after any context."""


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll a word that changes without an event; fails, naming ``what``, after PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.001)


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has reached every thread: on a busy machine they run on for milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    eventually(lambda: all("T (stopped)" in (task / "status").read_text() for task in tasks.iterdir()), "it stops")


class StagedVgpu:
    """One vGPU: its pages, its relay, and a thread that answers attaching processes as a broker does."""

    def __init__(self, stage: Stage, key: int, gpu_uuid: str, memory_bytes: int, mode: PageMode) -> None:
        self.vgpu_id = f"vgpu-{0xC0FFEE00 + key:08x}"
        self.key = key
        self.stage = stage
        self.mode = mode
        self.gpu_uuid = gpu_uuid
        self.refusal: str | None = None
        self.reply_late_s = 0.0
        self.reply_changes: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.store: StorePage | None = None
        """For what is away, if there is one."""
        self.next_slot = -1
        """The slot of the next process, if not the first that is free."""
        self.memory_bytes = memory_bytes
        self.window_ns = MS
        """Of the leases to come."""
        self._standing: int | None = None
        """The epoch of the newest standby lease, while there is to be one."""
        self.activity = ActivityPage.create(1)
        self.grants = self._grants(1)
        self.relay = Relay(self.activity, self.grants, stage.relay_page, key)
        stage.dispatcher.add(key, self.grants)
        self.directory = stage.runtime / "vgpus" / self.vgpu_id
        self.directory.mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / "broker.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _grants(self, generation: int) -> GrantsPage:
        page = GrantsPage.create(
            vgpu_id=self.vgpu_id,
            gpu_uuid=self.gpu_uuid,
            mode=self.mode,
            generation=generation,
            memory_limit_bytes=self.memory_bytes,
            total_memory_bytes=143_771 << 20,
        )
        page.implicit_ns = ALWAYS_NS
        return page

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link, contextlib.suppress(ConnectionError):
                    self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        size = struct.unpack("<I", link.recv(4, socket.MSG_WAITALL))[0]
        request = msgpack.unpackb(link.recv(size, socket.MSG_WAITALL))
        self.requests.append(request)
        pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if self.refusal is not None:
            body = msgpack.packb({"ok": False, "code": "not-yours", "error": self.refusal})
            link.sendall(struct.pack("<I", len(body)) + body)
            return
        slot = -1
        if request["role"] == "process":
            slot = request["slot"]
            if (slot, pid) not in [(known.index, known.pid) for known in self.slots()]:
                started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
                slot = self.activity.reserve_slot(pid, started, request["command"], self.next_slot)
                self.relay.watch(slot)
        reply: dict[str, Any] = {
            "ok": True,
            "slot": slot,
            "now_ns": time.monotonic_ns(),
            "mode": self.mode.name.lower(),
            "generation": self.grants.generation,
            "gpu_index": 0,
            "gpu_uuid": self.gpu_uuid,
            "vgpu_id": self.vgpu_id,
            "simulated": True,
            "sm_percent": 100.0,
            "mps_pipe_directory": "",
            "mps_log_directory": "",
            "mps_active_thread_percentage": "",
            "mps_pinned_memory_limit": "",
            "mps_client_priority": "",
        }
        body = msgpack.packb(reply | self.reply_changes)
        time.sleep(self.reply_late_s)
        pages = [page.fileno() for page in (self.grants, self.activity, self.store) if page is not None]
        socket.send_fds(link, [struct.pack("<I", len(body)) + body], pages)

    def restart_server(self) -> None:
        """What a new server does: a page of the next generation, then the word in the activity page."""
        self._forget_leases()
        self.grants = self._grants(self.grants.generation + 1)
        self.relay.rebind(self.grants)
        self.stage.dispatcher.add(self.key, self.grants)
        self.activity.generation = self.grants.generation

    def renew_relay(self) -> None:
        """The broker dies, and the next one takes over its page and its processes."""
        self.relay.close()
        slots = [slot.index for slot in self.slots()]
        self.relay = Relay(self.activity, self.grants, self.stage.relay_page, self.key, slots)

    def lose_everything(self) -> None:
        """Server and broker die together, and nobody says so in the old pages; new ones, with pages of their own."""
        self._forget_leases()
        self.relay.close()
        self.grants = self._grants(self.grants.generation + 1)
        self.activity = ActivityPage.create(self.grants.generation)
        self.relay = Relay(self.activity, self.grants, self.stage.relay_page, self.key)
        self.stage.dispatcher.add(self.key, self.grants)

    def lease(self, start_ns: int, end_ns: int | None, after: tuple[tuple[int, int], ...] = ()) -> int:
        """Publish one; its epoch."""
        epoch = next(self.stage.epochs)
        go_by_ns = start_ns + 50 * MS
        assert self.stage.dispatcher.publish(
            self.key, epoch, start_ns, end_ns, after, go_by_ns, window_ns=self.window_ns
        )
        return epoch

    def open(self) -> int:
        """From now on there is a standing, open-ended lease, until ``revoke``, ``withdraw`` or the server's end. GO
        comes with the first want; one that goes back as idle, which on a busy machine may be any moment, is followed by
        another, as a scheduler would do it. The epoch of the newest."""
        with self.stage.scheduling:
            if self._standing is None:
                self._standing = self._stand()
            self.stage.keep_standing()
            return self.renew()

    def _stand(self) -> int:
        epoch = next(self.stage.epochs)
        assert self.stage.dispatcher.publish(self.key, epoch, time.monotonic_ns(), None, on_want=True)
        return epoch

    def renew(self) -> int:
        """The epoch of the standby lease; of another one, if the last is over. With ``stage.scheduling``."""
        assert self._standing is not None
        if not self.stage.dispatcher.outstanding(self.key):
            self._standing = self._stand()
        return self._standing

    @property
    def stands(self) -> bool:
        """Whether there is to be a standby lease. With ``stage.scheduling``."""
        return self._standing is not None

    def revoke(self, end_ns: int) -> int:
        """End the standby lease then; no other follows. Its epoch."""
        with self.stage.scheduling:
            epoch = self.renew()
            self._standing = None
            while not self.end(epoch, end_ns):  # it went back as idle just now
                epoch = next(self.stage.epochs)
            return epoch

    def end(self, epoch: int, end_ns: int | None) -> bool:
        """Give a lease another end, or none. False: it is over already."""
        now_ns = time.monotonic_ns()
        start_ns = now_ns if end_ns is None else min(now_ns, end_ns - 1)
        return bool(self.stage.dispatcher.publish(self.key, epoch, start_ns, end_ns))

    def withdraw(self) -> None:
        """Take all of its leases: what has not begun is as if it had never been, the others end now."""
        with self.stage.scheduling:
            self._standing = None
            for epoch, _ in self.stage.dispatcher.outstanding(self.key):
                self.stage.dispatcher.withdraw(self.key, epoch)

    def _forget_leases(self) -> None:
        """The server is gone, and with it what it had granted."""
        with self.stage.scheduling:
            self._standing = None
            self.stage.dispatcher.remove(self.key)

    def await_want(self) -> None:
        """Until the dispatcher knows that it wants: a lease published before that would be given back as idle."""
        eventually(lambda: self.stage.dispatcher.wants(self.key), "the dispatcher heard that the vGPU wants")

    @contextlib.contextmanager
    def granting(self, length_ns: int) -> Iterator[None]:
        """A lease of that length whenever it wants and has none, as a scheduler would give it; eats the events."""
        over = threading.Event()

        def grant() -> None:
            epoch = 0
            while not over.wait(0.001):
                epoch *= all((e.kind, e.epoch) != (EventKind.DRAINED, epoch) for e in self.stage.dispatcher.events())
                if not epoch and self.stage.dispatcher.wants(self.key):
                    epoch = self.lease(time.monotonic_ns(), time.monotonic_ns() + length_ns)

        thread = threading.Thread(target=grant)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def slots(self) -> list[SlotReading]:
        return [s for s in self.activity.slots() if s.state != 0]

    def slot(self) -> SlotReading:
        (only,) = self.slots()
        return only

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.relay.close()


class Stage:
    """Simulated GPUs and vGPUs on them, under one directory: a path to a socket has 107 bytes, which pytest's own
    temporary directories may not leave."""

    def __init__(self, gpus: int = 1, memory_bytes: int = 143_771 << 20) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="stage-", ignore_cleanup_errors=True)
        self.runtime = Path(self._directory.name) / "run"
        self.gpus = Path(self._directory.name) / "gpus"
        self.runtime.mkdir()
        self.uuids = create_gpus(self.gpus, gpus, memory_bytes=memory_bytes)
        self.relay_page = RelayPage.create()
        self.dispatcher = Dispatcher(self.relay_page)
        self.epochs = itertools.count(1)
        self.vgpus: list[StagedVgpu] = []
        self.scheduling = threading.Lock()
        """Of who publishes, ends or withdraws standby leases."""
        self._over = threading.Event()
        self._keeper: threading.Thread | None = None
        self._processes: list[subprocess.Popen[str]] = []

    def vgpu(self, gpu: int = 0, memory_bytes: int = 8 * GIB, mode: PageMode = PageMode.TEMPORAL) -> StagedVgpu:
        self.vgpus.append(StagedVgpu(self, len(self.vgpus), self.uuids[gpu], memory_bytes, mode))
        return self.vgpus[-1]

    def spatial_vgpu(self) -> StagedVgpu:
        """In spatial mode, under a simulated MPS daemon for which this process stands."""
        pipe = self.runtime / "pipe"
        pipe.mkdir(exist_ok=True)
        (pipe / "simulated-mps").write_text(f"{os.getpid()} {start_time(os.getpid())}")
        vgpu = self.vgpu(mode=PageMode.SPATIAL)
        vgpu.reply_changes = {"mps_pipe_directory": str(pipe), "mps_active_thread_percentage": "30.31"}
        return vgpu

    def environment(self, *vgpus: StagedVgpu, **changes: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_"))}
        return (
            inherited
            | {
                "VGPU_ID": ",".join(v.vgpu_id for v in vgpus),
                "VGPU_RUNTIME_DIR": str(self.runtime),
                "VGPU_SIM_DIR": str(self.gpus),
                "LD_LIBRARY_PATH": str(LIBRARIES / "sim"),
                "LD_PRELOAD": str(HOOK),
            }
            | changes
        )

    def start(self, program: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """A Python program over tests.hook.app, with pipes; killed at the end of the test if it is still there."""
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def heard(self, process: subprocess.Popen[str]) -> str:
        """The next line the program prints, or what it died of."""
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return line.strip()

    def tell(self, process: subprocess.Popen[str], line: str = "go") -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def run(self, program: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        process = self.start(program, environment)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def events(self, *kinds: EventKind) -> Iterator[Event]:
        """The dispatcher's events of these kinds as they come; ends when none came for PATIENCE_S."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for event in self.dispatcher.events():
                if event.kind in kinds:
                    yield event
            time.sleep(0.001)

    def keep_standing(self) -> None:
        """From now on, see that whoever is to have a standby lease has one. Idempotent."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep)
            self._keeper.start()

    def _keep(self) -> None:
        while not self._over.wait(0.002):
            with self.scheduling:
                for vgpu in self.vgpus:
                    if vgpu.stands:
                        vgpu.renew()

    def fall_silent(self) -> None:
        """The server's heartbeat ends; what it has granted stays in the pages. Idempotent."""
        self._over.set()
        if self._keeper is not None:
            self._keeper.join()
        self.dispatcher.close()

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.fall_silent()
        for vgpu in self.vgpus:
            vgpu.close()
        self._directory.cleanup()
