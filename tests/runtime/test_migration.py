"""What a server does when the other one refuses, does not answer, answers twice, or its own disk is full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.lowlevel
import trio.testing

from gpuserver.core.admission.registry import GpuCapacity, Owner, Registry, VgpuRecord
from gpuserver.core.scheduler.leases import AccountState
from gpuserver.core.states.migration import AT_REST, MigrationState
from gpuserver.runtime.lifecycle import migration
from gpuserver.runtime.lifecycle.creation import Creations
from gpuserver.runtime.lifecycle.migration import Migration
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.paths import NodePaths
from vgpu.protocol.messages import Forward, Inspect, MigrateIn
from vgpu.share import Mode
from vgpu.spec import VgpuSpec

ID = "vgpu-00000001"
BOOK = AccountState(lag_ns=-5, bucket_ns=6, held_ns=7, busy_ns=8, overuse_ns=9, tokens=10)
PROGRAM = Process(4711, 12)
AWAY = VgpuError(ErrorCode.UNAVAILABLE, "nobody answers")
FULL = VgpuError(ErrorCode.NO_ROOM, "too much")
GRANTS = SimpleNamespace(implicit_bytes=3 << 30, total_memory_bytes=100 << 30)


@dataclass
class Server:
    """The state and the services of a GPU Server that a migration calls. ``done``: the calls, in their order."""

    index: int
    nursery: trio.Nursery
    writes: bool = True
    mode: Mode = Mode.TEMPORAL
    done: list[str] = field(default_factory=list)
    vgpus: dict[str, Vgpu] = field(default_factory=dict)
    journal: dict[str, MigrationState] = field(default_factory=dict)
    programs: tuple[Process, ...] = (PROGRAM,)
    brokers_are_quick: bool = True
    disk: trio.Event | None = None
    has_descriptors: bool = True

    def __post_init__(self) -> None:
        self.registry = Registry(GpuCapacity(100 << 30, 132), self.mode)
        self.facts = SimpleNamespace(index=self.index, uuid=f"GPU-{self.index}", name="H200")
        self.settings = SimpleNamespace(paths=NodePaths(Path("/nowhere"), Path("/nowhere")))
        self.tokens = SimpleNamespace(books=lambda: {0: BOOK}, next_epoch=77)
        played = cast(Any, self)
        creations = Creations(played, memory=played, brokers=played, swapping=played, suspension=played, removal=played)
        self.migration = Migration(played, suspension=played, brokers=played, creations=creations, removal=played)

    def create(self, **fields: Any) -> Vgpu:
        spec = VgpuSpec.parse(**({"sm_percent": 50, "memory_bytes": "40G"} | fields))
        return self.enlist(self.registry.create(ID, spec, Owner(1000), 5), None)

    def enlist(
        self,
        record: VgpuRecord,
        book: AccountState | None,
        *,
        passage: MigrationState = AT_REST,
        quiesced: bool = False,
    ) -> Vgpu:
        vgpu = Vgpu(record, 3, cast(Any, GRANTS), passage=passage, quiesced=quiesced)
        vgpu.registered.set()
        if self.brokers_are_quick:
            vgpu.admits.set()
        self.vgpus[record.vgpu_id] = vgpu
        self.book = book
        return vgpu

    def forget(self, vgpu: Vgpu) -> None:
        self.done.append("forget")
        self.registry.remove(vgpu.record.vgpu_id)
        del self.vgpus[vgpu.record.vgpu_id]

    def advance_past(self, generation: int, next_epoch: int) -> None:
        self.done.append(f"follow {generation} {next_epoch}")

    async def persist(self, new: Vgpu | None = None) -> bool:
        if self.disk is None:
            await trio.lowlevel.checkpoint()
        else:
            await self.disk.wait()
        if self.writes:
            if new is not None:
                new.written = True
            self.journal = {vgpu_id: vgpu.passage for vgpu_id, vgpu in self.vgpus.items()}
        return self.writes

    def require_descriptors(self) -> None:
        if not self.has_descriptors:
            raise VgpuError(ErrorCode.UNAVAILABLE, "no descriptors")

    def apply_shares(self) -> None: ...
    def count_occupied(self, *, besides: int) -> None:
        self.registry.occupied_bytes = besides

    def check(self, vgpu: Vgpu) -> None: ...
    def record_event(self, kind: str, vgpu: Vgpu, text: str, **fields: object) -> None:
        self.done.append(kind)

    async def processes(self, vgpu: Vgpu) -> list[Process]:
        return list(self.programs)

    async def quiesce(self, vgpu: Vgpu) -> None:
        self.done.append("halt")
        vgpu.quiesced = True

    async def resume(self, vgpu: Vgpu) -> None:
        self.done.append("resume")
        vgpu.quiesced, vgpu.passage = False, vgpu.passage.brought_back()

    def release(self, vgpu: Vgpu) -> None:
        self.done.append("let go")

    def claim(self, vgpu: Vgpu) -> None:
        self.done.append("claim")

    async def keep(self, vgpu: Vgpu) -> None:
        self.done.append("keep")


Answers = list[VgpuError | None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[MigrateIn | Inspect], Answers]:
    """What was asked of other servers; what they answer, one after the other, then that all is well."""
    requests: list[MigrateIn | Inspect] = []
    answers: Answers = []

    async def ask(path: Path, forward: Forward, model: type[Any], timeout_s: float) -> Any:
        await trio.lowlevel.checkpoint()
        assert isinstance(forward.request, (MigrateIn, Inspect))
        requests.append(forward.request)
        answer = answers.pop(0) if answers else None
        if answer is not None:
            raise answer

    monkeypatch.setattr(migration, "ask", ask)
    monkeypatch.setattr(migration, "find_broker", lambda paths, vgpu_id: None)
    monkeypatch.setattr(migration, "AGAIN_S", 0)
    monkeypatch.setattr(migration, "RELEASE_S", 0)
    return requests, answers


def run(test: Callable[[Server], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await test(Server(0, nursery, **fields))

    trio.run(main)


Asked = tuple[list[MigrateIn | Inspect], Answers]


def test_the_other_is_asked_until_it_answers(asked: Asked) -> None:
    """And the journal said so before the first question that counts."""
    requests, answers = asked
    answers += [None, AWAY, AWAY]

    async def test(server: Server) -> None:
        vgpu = server.create()
        departure = await server.migration.leave(vgpu, 1)
        assert departure.goes_on
        assert server.done == ["halt", "let go", "forget"]
        assert (server.vgpus, server.journal) == ({}, {})
        trial, *others = requests
        assert isinstance(trial, MigrateIn)
        assert (trial.trial, trial.goes_on) == (True, False)
        assert len(others) == 3
        assert all(other == others[0] for other in others)
        told = others[0]
        assert isinstance(told, MigrateIn)
        assert (told.trial, told.goes_on, told.home) == (False, True, "GPU-0")
        assert (told.programs, told.generation, told.next_epoch) == (((4711, 12),), 3, 77)

    run(test)


def test_refused_at_the_trial_nothing_has_happened(asked: Asked) -> None:
    async def test(server: Server) -> None:
        vgpu = server.create()
        asked[1].append(FULL)
        with pytest.raises(VgpuError, match="too much"):
            await server.migration.leave(vgpu, 1)
        assert (server.done, vgpu.passage, vgpu.quiesced) == ([], AT_REST, False)

    run(test)


def test_refused_after_all_it_goes_on_where_it_was(asked: Asked) -> None:
    async def test(server: Server) -> None:
        vgpu = server.create()
        asked[1].extend([None, AWAY, FULL])
        with pytest.raises(VgpuError, match="stays on GPU 0; GPU 1: too much") as refused:
            await server.migration.leave(vgpu, 1)
        assert refused.value.code is ErrorCode.NO_ROOM
        assert server.done[:2] == ["halt", "let go"]
        assert set(server.done[2:]) == {"claim", "keep", "resume"}
        assert (vgpu.quiesced, vgpu.passage.next_step.value) == (False, "stay")
        assert server.vgpus == {ID: vgpu}

    run(test)


def test_what_cannot_be_written_is_not_begun(asked: Asked) -> None:
    """Else a server that is killed would bring it back although the other one has it."""

    async def test(server: Server) -> None:
        vgpu = server.create()
        with pytest.raises(VgpuError, match="journal of GPU 0 cannot be written"):
            await server.migration.leave(vgpu, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert [request for request in asked[0] if isinstance(request, MigrateIn) and not request.trial] == []
        assert server.done == ["halt", "resume"]

    run(test, writes=False)


def test_one_that_is_leaving_already_is_waited_for_and_goes_nowhere_else(asked: Asked) -> None:
    async def test(server: Server) -> None:
        vgpu = server.create()
        vgpu.passage = AT_REST.left(1, "GPU-0", ())
        with pytest.raises(VgpuError, match="on its way to GPU 1"):
            await server.migration.leave(vgpu, 2)
        server.nursery.start_soon(server.migration.settle, vgpu)  # as after a restart
        assert not (await server.migration.leave(vgpu, 1)).goes_on
        assert server.done == ["forget"]

    run(test)


def arriving(**fields: Any) -> MigrateIn:
    usual = {
        "vgpu": ID,
        "spec": VgpuSpec.parse(sm_percent=50, memory_bytes="40G"),
        "owner_uid": 1000,
        "share_gid": -1,
        "created_unix_ns": 5,
        "expires_unix_ns": None,
        "source": 1,
        "gpu_name": "H200",
        "suspended": False,
        "goes_on": True,
        "home": "GPU-1",
        "programs": ((4711, 12),),
        "generation": 9,
        "next_epoch": 1000,
        "book": {"lag_ns": -5, "bucket_ns": 6, "held_ns": 7, "busy_ns": 8, "overuse_ns": 9, "tokens": 10},
    }
    return MigrateIn(**usual | fields)


def test_the_same_question_has_the_same_answer(asked: Asked) -> None:
    """It is taken once, under pages later than any before, with its account but without what it is owed elsewhere."""
    asked[1].extend([None, AWAY, VgpuError(ErrorCode.NOT_FOUND, "gone")])  # is it still known where it came from?

    async def test(server: Server) -> None:
        await server.migration.arrive(arriving(trial=True))
        assert (server.vgpus, server.done) == ({}, [])
        for _ in range(2):
            await server.migration.arrive(arriving())
        vgpu = server.vgpus[ID]
        assert server.done[:2] == ["follow 9 1000", "claim"]
        assert sorted(server.done[2:]) == ["keep", "migrated", "resume"]
        assert server.journal[ID] == MigrationState(True, came_from=1, home="GPU-1", programs=(PROGRAM,))
        assert server.book == AccountState(lag_ns=0, bucket_ns=6, held_ns=7, busy_ns=8, overuse_ns=9, tokens=10)
        assert (vgpu.record.created_unix_ns, vgpu.record.owner) == (5, Owner(1000))
        while vgpu.passage.came_from is not None:
            await trio.lowlevel.checkpoint()
        assert [type(request) for request in asked[0]] == [Inspect] * 3
        await server.migration.release(vgpu)
        assert len(asked[0]) == 3

    run(test)


def test_what_cannot_be_written_is_not_taken(asked: Asked) -> None:
    async def test(server: Server) -> None:
        with pytest.raises(VgpuError, match="journal of GPU 0 cannot be written"):
            await server.migration.arrive(arriving())
        assert server.vgpus == {}
        assert "claim" not in server.done

    run(test, writes=False)


def test_who_asks_again_while_it_is_written_is_not_told_that_it_is_here(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody would remember it: whoever asks forgets it on that answer, and the disk may refuse."""
    monkeypatch.setattr(migration, "BROKER_S", 0.1)
    answers: list[str] = []

    async def ask(server: Server) -> None:
        try:
            await server.migration.arrive(arriving())
            answers.append("taken")
        except VgpuError as error:
            answers.append(error.message)

    async def test(server: Server) -> None:
        server.disk = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server)
            await trio.testing.wait_all_tasks_blocked()
            await ask(server)
            server.disk.set()
        assert server.vgpus == {}
        assert answers == [f"{ID} is not in the journal of GPU 0 yet", "the journal of GPU 0 cannot be written"]

    run(test, writes=False, brokers_are_quick=False)


def test_it_comes_with_what_it_has(asked: Asked) -> None:
    """However little it was promised. Suspended, it needs no room."""
    asked[1].append(VgpuError(ErrorCode.NOT_FOUND, "gone"))
    small = VgpuSpec.parse(sm_percent=50, memory_bytes="40G")

    async def test(server: Server) -> None:
        server.registry.create("vgpu-00000002", VgpuSpec.parse(sm_percent=1, memory_bytes="50G"), Owner(1000), 5)
        for trial in (True, False):
            coming = arriving(trial=trial, spec=small, owned_bytes=60 << 30, excess_bytes=20 << 30)
            with pytest.raises(VgpuError) as refused:
                await server.migration.arrive(coming)
            assert refused.value.code is ErrorCode.NO_ROOM
            assert "--mem" not in refused.value.hint  # less than it has would be refused again
        assert server.vgpus == {}
        await server.migration.arrive(
            arriving(spec=small, suspended=True, goes_on=False, owned_bytes=60 << 30, excess_bytes=20 << 30)
        )

    run(test)


def test_one_that_may_be_known_elsewhere_is_not_given_away(asked: Asked) -> None:
    """Asked once more, this server would be a stranger to it, and take it in a second time."""

    async def test(server: Server) -> None:
        vgpu = server.create()
        vgpu.passage = AT_REST.arrived(1)
        for answer in (None, AWAY):
            asked[1].append(answer)
            with pytest.raises(VgpuError, match="has just come from GPU 1"):
                await server.migration.leave(vgpu, 2)
        assert server.done == []

    run(test)


@pytest.mark.parametrize(
    ("fields", "code", "hint"),
    [
        ({"gpu_name": "A100"}, ErrorCode.IN_USE, "end them first: vgpuctl ps"),
        (
            {"spec": VgpuSpec.parse(sm_percent=50, memory_bytes="400G")},
            ErrorCode.NO_ROOM,
            f"the largest that fits: vgpuctl set {ID} --mem 102400M, then vgpuctl migrate {ID} --gpu 0",
        ),
    ],
)
def test_what_is_not_taken_leaves_nothing(asked: Asked, fields: dict[str, Any], code: ErrorCode, hint: str) -> None:
    async def test(server: Server) -> None:
        for trial in (True, False):
            with pytest.raises(VgpuError) as refused:
                await server.migration.arrive(arriving(trial=trial, **fields))
            assert (refused.value.code, refused.value.hint) == (code, hint)
        assert (server.vgpus, len(server.registry), server.done) == ({}, 0, [])

    run(test)


def test_without_descriptors_for_it_nothing_is_taken(asked: Asked) -> None:
    async def test(server: Server) -> None:
        for trial in (True, False):
            with pytest.raises(VgpuError, match="no descriptors"):
                await server.migration.arrive(arriving(trial=trial))
        assert (server.vgpus, len(server.registry), server.done) == ({}, 0, [])

    run(test, has_descriptors=False)


def test_without_programs_the_kind_of_gpu_is_no_matter(asked: Asked) -> None:
    asked[1].append(VgpuError(ErrorCode.NOT_FOUND, "gone"))

    async def test(server: Server) -> None:
        await server.migration.arrive(arriving(gpu_name="A100", programs=(), home="", goes_on=False, suspended=True))
        assert server.vgpus[ID].record.suspended
        assert "resume" not in server.done

    run(test)
