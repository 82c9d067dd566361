"""The soak's actions, on a node of real processes. Each one brings node and model from one state to the next."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import msgpack

from tests.integration.node import ROOT, SimulatedNode
from tests.integration.process import attach_request, knock
from tests.soak.model import MIB, SIZES_MIB, Action, Expected, World
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec

T = TypeVar("T")
ANSWER_S: Final = 120.0
LOST: Final = frozenset(
    {ErrorCode.UNREACHABLE, ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE, ErrorCode.PROTOCOL, ErrorCode.INTERNAL}
)
"""The answer may have been lost, or the node could not ask: the soak asks again."""


class Stopped:
    """Processes that were stopped by SIGSTOP, each until its time is over."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def stop(self, pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            timer = threading.Timer(seconds, self._resume_after, [pid])
            self._timers.append(timer)
            timer.start()

    def _resume_after(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def wait(self) -> None:
        for timer in self._timers:
            timer.join()
        self._timers.clear()


class Performer:
    """``performed`` is called with each action; ``programs`` are the processes by pid."""

    def __init__(self, node: SimulatedNode, world: World, random: Random) -> None:
        self.node, self.world, self.random = node, world, random
        self.programs: dict[int, subprocess.Popen[str]] = {}
        self.workers: set[int] = set()
        self.stopped = Stopped()
        self.refused: dict[str, int] = {}

    def perform(self, action: Action) -> None:
        getattr(self, f"_{action.kind}")(action)

    def asked(self, request: Callable[[ControlLink], T]) -> T | VgpuError:
        """The answer of the node, or its refusal. It is asked again for as long as answers are lost."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            lost = self._attempt(request)
            if not isinstance(lost, VgpuError) or lost.code not in LOST:
                return lost
            assert time.monotonic() < deadline, f"no answer within {ANSWER_S:g} s: {lost.code} {lost}"
            time.sleep(0.05)

    def _attempt(self, request: Callable[[ControlLink], T]) -> T | VgpuError:
        try:
            with ControlLink(self.node.paths.control_socket, timeout_s=ANSWER_S) as link:
                return request(link)
        except VgpuError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
            return error

    def granted(self, request: Callable[[ControlLink], T], *, fits: bool) -> T | None:
        """The answer; None where the node has no room. Both must be what the model says."""
        answer = self.asked(request)
        if isinstance(answer, VgpuError):
            assert answer.code is ErrorCode.NO_ROOM, f"{answer.code}: {answer}"
            assert not fits, f"refused, though it fits: {answer}"
            return None
        assert fits, "granted, though the GPU's time is promised to others"
        return answer

    def listed(self) -> tuple[VgpuStatus, ...]:
        answer = self.asked(lambda link: link.list())
        assert not isinstance(answer, VgpuError), str(answer)
        return answer

    # --- what a person asks for

    def _create(self, action: Action) -> None:
        gpu, name = self.random.randrange(self.world.gpus), self.world.next_name()
        memory = self.random.choice(SIZES_MIB) * MIB
        spec = VgpuSpec.parse(name=name, sm_percent=action.number, memory_bytes=memory)

        def create(link: ControlLink) -> VgpuStatus:
            try:
                return link.create(spec, str(gpu))
            except VgpuError as error:
                if error.code is not ErrorCode.EXISTS:
                    raise
                return next(vgpu for vgpu in link.list() if vgpu.name == name)  # the lost answer was a yes

        made = self.granted(create, fits=self.world.fits(gpu, action.number))
        if made is not None:
            self.world.created(Expected(made.vgpu_id, name, gpu, action.number, memory))

    def _resize(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]
        fits = vgpu.suspended or self.world.fits(vgpu.gpu, action.number, but=vgpu.vgpu_id)
        changes = VgpuChanges.parse(sm_percent=action.number)
        if self.granted(lambda link: link.set(vgpu.vgpu_id, changes), fits=fits):
            vgpu.sm_percent = action.number

    def _remove(self, action: Action) -> None:
        self.remove(action.vgpu)

    def remove(self, vgpu_id: str) -> None:
        answer = self.asked(lambda link: link.remove(vgpu_id, force=True))
        if isinstance(answer, VgpuError):
            assert answer.code in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED}, f"{answer.code}: {answer}"
        for pid in list(self.world.vgpus[vgpu_id].pids):
            self.end(pid)
        self.world.removed(vgpu_id)

    def _suspend(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]
        answer = self.asked(lambda link: link.suspend(vgpu.vgpu_id))
        assert not isinstance(answer, VgpuError), f"{answer.code}: {answer}"
        vgpu.suspended = True

    def _resume(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]
        fits = self.world.fits(vgpu.gpu, vgpu.sm_percent, but=vgpu.vgpu_id)
        if self.granted(lambda link: link.resume(vgpu.vgpu_id), fits=fits):
            vgpu.suspended = False

    def _migrate(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]

        def migrate(link: ControlLink) -> VgpuStatus:
            found = next(one for one in link.list() if one.vgpu_id == vgpu.vgpu_id)
            if found.gpu_index == action.number and found.state != "moving":
                return found  # the lost answer was a yes
            return link.migrate(vgpu.vgpu_id, str(action.number))

        if self.granted(migrate, fits=self.world.fits(action.number, vgpu.sm_percent)):
            vgpu.gpu = action.number

    # --- programs

    def _start(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]
        reading = self._reading(vgpu.vgpu_id)
        most = vgpu.memory_bytes // 8
        popen = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.program", action.choice, str(action.number), str(most)],
            env=attachment([reading]).environment(self.node.environment),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.programs[popen.pid] = popen
        vgpu.pids.add(popen.pid)
        if action.choice == "worker":
            self.workers.add(popen.pid)

    def _reading(self, vgpu_id: str) -> VgpuStatus:
        return next(vgpu for vgpu in self.listed() if vgpu.vgpu_id == vgpu_id)

    def end(self, pid: int) -> None:
        popen = self.programs.pop(pid)
        self.workers.discard(pid)
        popen.kill()
        popen.wait()  # for itself alone: a child of it may have the other end of its pipes
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        for vgpu in self.world.vgpus.values():
            vgpu.pids.discard(pid)

    # --- deaths and pauses

    def _victim(self, action: Action) -> int | None:
        vgpu = self.world.vgpus[action.vgpu]
        if action.choice == "node":
            return self.node.supervisor.pid
        if action.choice == "program":
            return self.random.choice(sorted(self.programs)) if self.programs else None
        if action.choice == "broker":
            return self._reading(vgpu.vgpu_id).broker_pid
        gpus = self.asked(lambda link: link.gpus())
        assert not isinstance(gpus, VgpuError), str(gpus)
        return gpus[vgpu.gpu].server_pid

    def _kill(self, action: Action) -> None:
        pid = self._victim(action)
        if action.choice == "node":
            self.node.kill_node()
            self.node.start()
        elif pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop_a_while(self, action: Action) -> None:
        pid = self._victim(action)
        if pid:
            self.stopped.stop(pid, self.random.choice((0.05, 0.3, 1.5)))

    # --- what a hostile user does

    def _hostile_frames(self, action: Action) -> None:
        random = Random(action.number)
        doors = [self.node.paths.control_socket]
        doors += [self.node.paths.broker_socket(vgpu_id) for vgpu_id in self.world.vgpus]
        for _ in range(20):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as link:
                link.settimeout(1)
                link.connect(str(random.choice(doors)))
                self._send_nonsense(link, random)

    def _send_nonsense(self, link: socket.socket, random: Random) -> None:
        body = random.choice(
            (
                random.randbytes(random.randrange(1, 400)),
                msgpack.packb({"op": random.choice(("hello", "attach", "create", "")), "version": 1 << 62}),
                msgpack.packb({"op": "hello", "x" * random.randrange(3000): [[[[]]]]}),
                msgpack.packb([1, 2, 3]),
            )
        )
        length = random.choice((len(body), 0, 1 << 31, len(body) + 9))
        data = struct.pack("<I", length) + body
        if random.random() < 0.3:
            with Path(os.devnull).open() as null:
                socket.send_fds(link, [data], [null.fileno()] * random.randrange(1, 9))
        else:
            link.sendall(data)
        if random.random() < 0.5:
            link.recv(4096)

    def _hostile_peer(self, action: Action) -> None:
        random = Random(action.number)
        door = self.node.paths.broker_socket(action.vgpu)
        for _ in range(5):
            changes = random.choice(
                (
                    {"role": "observer"},
                    {"slot": random.choice((64, -2, 1 << 40)), "role": "observer"},
                    {"command": "\x1b[2J" * random.randrange(500), "role": "observer"},
                    {"version": random.randrange(1 << 31)},
                    {"op": "register"},
                )
            )
            with suppress(OSError, EOFError):
                for descriptor in knock(door, attach_request(**changes))[1]:
                    os.close(descriptor)

    def _scribble(self, action: Action) -> None:
        vgpu = self.world.vgpus[action.vgpu]
        vgpu.damaged = True
        door = self.node.paths.broker_socket(vgpu.vgpu_id)
        subprocess.run(
            [sys.executable, "-m", "tests.soak.scribbler", str(door), str(action.number)],
            env=self.node.environment,
            cwd=ROOT,
            check=False,
            timeout=ANSWER_S,
            stderr=subprocess.DEVNULL,
        )
