"""Evidence as a good GPU would leave it, to be changed by tests."""

from __future__ import annotations

from vgpu.protocol.messages import GpuStatus
from vgpu.verify.measured import Ending, Evidence, LaunchRun, LightRun, MemoryRun, ProgramRun, ShareRun, SmRun

MIB = 1 << 20
MS = 1_000_000


def program(percent: float, *, ratio: float, work: float | None = None, books: float | None = None) -> ProgramRun:
    done = ratio * 1000 if work is None else work
    return ProgramRun(
        percent=percent,
        device_ratio=ratio,
        books_ratio=books,
        work_per_s=done,
        work_series=(done / 4,) * 8,
        kernels=tuple((i * 10 * MS, i * 10 * MS + int(ratio * 10 * MS)) for i in range(20)),
    )


def alone(percent: float, ratio: float, books: float | None = None) -> ShareRun:
    return ShareRun((program(percent, ratio=ratio, books=books),))


def memory(**changed: object) -> MemoryRun:
    fields: dict[str, object] = {
        "limit_bytes": 2048 * MIB,
        "total_bytes": 2048 * MIB,
        "free_bytes": 1567 * MIB,
        "pieces": 783,
        "piece_bytes": 2 * MIB,
        "left_bytes": MIB,
        "freed_bytes": 1567 * MIB,
        "refusal": "CUDA_ERROR_OUT_OF_MEMORY",
    }
    return MemoryRun(**(fields | changed))  # type: ignore[arg-type]


def unlimited_memory() -> MemoryRun:
    card, free = 140_000 * MIB, 139_000 * MIB
    left = free - 1040 * 2 * MIB
    return memory(total_bytes=card, free_bytes=free, pieces=1040, left_bytes=left, freed_bytes=free, refusal="")


def killed(**changed: object) -> Ending:
    fields: dict[str, object] = {
        "lease_back_ns": 400_000,
        "held_bytes": 700 * MIB,
        "kept_bytes": 0,
        "gone_ns": 30 * MS,
        "neighbour_bytes": (500 * MIB, 500 * MIB),
        "neighbour_work": 1e9,
    }
    return Ending(**(fields | changed))  # type: ignore[arg-type]


def launches(added_ns: float, *, hooked: bool = True) -> LaunchRun:
    direct = tuple(2900.0 + i % 7 for i in range(100))
    return LaunchRun(hooked, tuple(ns + added_ns for ns in direct), direct)


def good() -> Evidence:
    free = alone(100.0, 0.998)
    pair = ShareRun((program(30.0, ratio=0.295), program(70.0, ratio=0.69)))
    even = ShareRun((program(30.0, ratio=0.9, work=500.0), program(70.0, ratio=0.9, work=500.0)))
    return Evidence(
        shares={"share-30-alone": alone(30.0, 0.299, 0.301), "share-30-70": pair},
        unlimited_shares={"share-30-alone": free, "share-30-70": even},
        light=LightRun(980.0, 1000.0),
        light_in_turns=LightRun(450.0, 1000.0),
        memory=memory(),
        unlimited_memory=unlimited_memory(),
        killed=[killed(), killed(lease_back_ns=900_000)],
        stopped=killed(lease_back_ns=20 * MS, kept_bytes=700 * MIB, gone_ns=None),
        launches=launches(13.0),
        delayed_launches=launches(2010.0),
        sms=[SmRun(30.0, 132, 40, 40), SmRun(70.0, 132, 92, 92)],
        unlimited_sms=SmRun(30.0, 132, 40, 132),
    )


def gpu(*, simulated: bool = True, name: str = "Simulated H200") -> GpuStatus:
    return GpuStatus(
        index=0,
        uuid="GPU-00000000",
        name=name,
        simulated=simulated,
        state="serving",
        mode="temporal",
        mode_reason="asked for",
        period_ns=40 * MS,
        sm_count=132,
        total_memory_bytes=140_000 * MIB,
        used_memory_bytes=0,
        guaranteed_ratio=0.0,
        guaranteed_memory_bytes=0,
        vgpus=0,
        processes=0,
        held_ratio=0.0,
        busy_ratio=0.0,
        tokens_per_second=0.0,
        server_pid=1,
        restarts=0,
    )
