"""Nine planted situations, nine sentences: what holds a vGPU back, with its figures, and what to type."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import gpu_reading, vgpu_reading
from vgpu.protocol.messages import OutsideProcess, VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.usage.facts import Facts, figures
from vgpu.usage.rows import Sums
from vgpu.usage.why import FINDERS, Cause, why

S = 1_000_000_000
HOUR_NS = 3600 * S
GIB = 1 << 30
MOST_WORDS = 25


def vgpu(**changes: Any) -> VgpuStatus:
    fields: dict[str, Any] = {"name": "web", "owner_uid": 1000, "memory_refusals": 0, "memory_refused_bytes": 0}
    return vgpu_reading(**fields | changes)


def hour(**changes: int) -> Sums:
    """An hour with a program in it: ``changes`` in seconds, but for counts."""
    seconds = {"measured": 3600, "attached": 3600, "promised": 1080, "used": 1060} | changes
    counts = {name: seconds.pop(name) for name in ("refusals", "swaps") if name in seconds}
    return Sums(**{f"{name}_ns": value * S for name, value in seconds.items()}, **counts)


def facts(**changes: Any) -> Facts:
    """One vGPU of 30 % on GPU 0, of which 70 % are promised; GPU 1 is as full."""
    gpu = gpu_reading(guaranteed_ratio=0.7, guaranteed_memory_bytes=100 * GIB, outside=())
    fields: dict[str, Any] = {
        "vgpu": vgpu(),
        "gpu": gpu,
        "gpus": (gpu, gpu_reading(index=1, guaranteed_ratio=0.9, guaranteed_memory_bytes=140 * GIB)),
        "neighbours": (vgpu(vgpu_id="vgpu-00000002", name="train", guarantee_ratio=0.4),),
        "recent": hour(),
        "idle_s": 0.0,
    }
    fields |= changes
    fields["gpus"] = (fields["gpu"], *(gpu for gpu in fields["gpus"] if gpu.index != fields["gpu"].index))
    return Facts(**fields)


def gpu0(**changes: Any) -> Any:
    return gpu_reading(**{"guaranteed_ratio": 0.7, "guaranteed_memory_bytes": 100 * GIB, "outside": ()} | changes)


FULL = gpu0(guaranteed_ratio=1.0)
ROOM = gpu_reading(index=1, guaranteed_ratio=0.4, guaranteed_memory_bytes=20 * GIB)
QUIET: dict[str, Any] = {"busy_ratio": 0.0, "held_ratio": 0.0, "wants": False, "holds": False}
SWAPPED = vgpu(spec=VgpuSpec(sm_percent=30, oversubscribe="swap"), memory_used_bytes=100 * GIB)
SITUATIONS: dict[str, tuple[Facts, Cause, str, str]] = {
    "1 at its limit, and there is room here": (
        facts(recent=hour(limited=2556)),
        Cause.AT_LIMIT,
        "At its limit 71 % of the time: --sm 45 would do; 30 % of GPU 0 are free.",
        "vgpuctl set web --sm 45",
    ),
    "1 at its limit in time": (
        facts(
            vgpu=vgpu(spec=VgpuSpec(sm_percent=30, quota_request_percent=20, quota_limit_percent=40)),
            recent=hour(limited=3600),
        ),
        Cause.AT_LIMIT,
        "At its limit 100 % of the time: --quota-limit 60 is the next step; 30 % of GPU 0 are free.",
        "vgpuctl set web --quota-limit 60",
    ),
    "2 at its limit, and there is room on another GPU": (
        facts(recent=hour(limited=1800), gpu=FULL, gpus=(FULL, ROOM)),
        Cause.AT_LIMIT_HERE,
        "At its limit 50 % of the time, and GPU 0 has no room: 60 % of GPU 1 are free.",
        "vgpuctl migrate web --gpu 1 && vgpuctl set web --sm 45",
    ),
    "2 at its limit, and there is no room": (
        facts(recent=hour(limited=1800), gpu=FULL),
        Cause.AT_LIMIT_EVERYWHERE,
        "At its limit 50 % of the time, and no GPU has room: with --burst it would use what others leave idle.",
        "vgpuctl set web --burst",
    ),
    "3 host-bound": (
        facts(recent=hour(used=288, wasted=792)),
        Cause.HOST_BOUND,
        "Its programs used 8 % of GPU 0, and 30 % are promised: they wait for their host, not for the GPU. "
        "--sm 12 would do.",
        "vgpuctl set web --sm 12",
    ),
    "3 host-bound, and its GPU Server advises a size": (
        facts(recent=hour(used=288, wasted=792), advised_percent=15.0),
        Cause.HOST_BOUND,
        "Its programs used 8 % of GPU 0, and 30 % are promised: they wait for their host, not for the GPU. "
        "--sm 15 would do.",
        "vgpuctl set web --sm 15",
    ),
    "4 idle for long": (
        facts(vgpu=vgpu(**QUIET), recent=hour(used=0), idle_s=5 * 3600.0 + 7),
        Cause.IDLE,
        "No program has used it for 5h, and 30 % of GPU 0 and 8 GiB are promised to it: rm gives them back.",
        "vgpuctl rm web",
    ),
    "5 memory is full": (
        facts(
            vgpu=vgpu(memory_used_bytes=8 * GIB - (100 << 20), memory_refused_bytes=2 * GIB),
            recent=hour(refusals=12),
        ),
        Cause.MEMORY_FULL,
        "12 allocations were refused, the last of 2 GiB; it has 7.9 GiB of 8 GiB: --mem 10G would do, "
        "and 41 GiB of GPU 0 are free.",
        "vgpuctl set web --mem 10G",
    ),
    "5 memory is full, and there is room on another GPU": (
        facts(
            vgpu=vgpu(memory_used_bytes=8 * GIB, memory_refused_bytes=2 * GIB),
            recent=hour(refusals=1),
            gpu=gpu0(guaranteed_memory_bytes=141 * GIB),
            gpus=(ROOM,),
        ),
        Cause.MEMORY_FULL,
        "1 allocation was refused, the last of 2 GiB; it has 8 GiB of 8 GiB: --mem 10G would do, and GPU 0 has no "
        "room, but GPU 1 has.",
        "vgpuctl migrate web --gpu 1 && vgpuctl set web --mem 10G",
    ),
    "6 suspended": (
        facts(vgpu=vgpu(state="suspended", **QUIET), recent=hour(used=0), idle_s=9000.0),
        Cause.SUSPENDED,
        "A user suspended it: its programs stand still. Others may be promised its 30 % of GPU 0 and 8 GiB meanwhile.",
        "vgpuctl resume web",
    ),
    "6 idle-suspended": (
        facts(vgpu=vgpu(state="idle-suspended", spec=VgpuSpec(sm_percent=30, idle_suspend_ns=600 * S))),
        Cause.IDLE_SUSPENDED,
        "It was idle for 10m (--idle-suspend), and comes back when one of its programs wants the GPU. "
        "30 % of GPU 0 and 8 GiB stay promised.",
        "",
    ),
    "6 restarting": (
        facts(vgpu=vgpu(state="restarting", reason="its server ended by signal 9")),
        Cause.RESTARTING,
        "The GPU Server of GPU 0 does not answer, and its programs wait: its server ended by signal 9.",
        "vgpuctl logs gpu 0",
    ),
    "7 less than promised: overcommit": (
        facts(
            recent=hour(used=648, waiting=2900),
            gpu=gpu0(guaranteed_ratio=1.0),
            gpus=(ROOM,),
            neighbours=(vgpu(vgpu_id="vgpu-00000002", spec=VgpuSpec(sm_percent=100, overcommit=True)),),
        ),
        Cause.OVERCOMMIT,
        "It had 18 % of GPU 0, and 30 % were promised: GPU 0 is overcommitted (130 % in sum), so the promise is a "
        "weight. GPU 1 has room for it.",
        "vgpuctl migrate web --gpu 1",
    ),
    "7 less than promised: burst": (
        facts(
            vgpu=vgpu(mode="spatial", sm_percent_granted=50.0, guarantee_ratio=1.0, limit_ratio=1.0),
            recent=hour(used=900, waiting=2900),
            neighbours=(vgpu(vgpu_id="vgpu-00000002", name="train", spec=VgpuSpec(sm_percent=30, burst=True)),),
        ),
        Cause.NEIGHBOURS,
        "It had 25 % of GPU 0, and 50 % were promised: train may use all SMs (--burst), and MPS takes nothing back "
        "inside a kernel.",
        "vgpuctl set vgpu-00000002 --no-burst",
    ),
    "8 swapped memory goes to and fro": (
        facts(
            vgpu=SWAPPED,
            recent=hour(swaps=240),
            gpus=(ROOM,),
            neighbours=(SWAPPED.model_copy(update={"vgpu_id": "vgpu-00000002"}),),
        ),
        Cause.SWAPS,
        "Its memory came back to the card 240 times an hour: the vGPUs that swap have 200 GiB, and GPU 0 has 141 GiB. "
        "GPU 1 has room for it.",
        "vgpuctl migrate web --gpu 1",
    ),
    "8 its group waits for another GPU": (
        facts(
            vgpu=vgpu(
                state="swapped",
                spec=VgpuSpec(sm_percent=30, oversubscribe="swap", group="job"),
                reason="the vGPU of its group on GPU 1 has no room yet",
            )
        ),
        Cause.GROUP,
        "Its programs wait: the vGPU of its group on GPU 1 has no room yet. "
        "The vGPUs of a group are on their GPUs all or none.",
        "vgpuctl ls",
    ),
    "9 no program": (
        facts(vgpu=vgpu(processes=0, **QUIET), recent=Sums(measured_ns=HOUR_NS // 4), idle_s=900.0),
        Cause.NO_PROGRAM,
        "No program is in it: a program joins it by exec, or with its VGPU_ID in the environment.",
        "vgpuctl exec web COMMAND",
    ),
    "9 its owner's programs run in no vGPU": (
        facts(
            vgpu=vgpu(processes=0, **QUIET),
            recent=Sums(measured_ns=HOUR_NS // 4),
            gpu=gpu0(
                outside=[
                    OutsideProcess(gpu_index=0, pid=pid, uid=uid, command="python", memory_bytes=GIB)
                    for pid, uid in ((12, 1000), (13, 1000), (14, 1001))
                ]
            ),
        ),
        Cause.OUTSIDE,
        "2 programs of its owner on GPU 0 run in no vGPU (pid 12, 13): nothing limits them or counts them.",
        "vgpuctl exec web COMMAND",
    ),
    "9 all is as promised": (
        facts(),
        Cause.AS_PROMISED,
        "All is as promised: it used 29 % of GPU 0, 30 % are promised, and nothing held it back.",
        "",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_has_its_sentence(name: str) -> None:
    planted, cause, text, command = SITUATIONS[name]
    first, *_ = why(planted)
    assert (first.cause, first.text, first.command) == (cause, text, command)
    for sentence in re.split(r"(?<=[.:;]) ", text):
        assert len(sentence.split()) <= MOST_WORDS, sentence


def test_nine_situations_are_planted() -> None:
    assert {name[0] for name in SITUATIONS} == set("123456789")


def test_without_history_the_last_second_counts() -> None:
    throttled = facts(vgpu=vgpu(throttled=True), recent=Sums())
    assert why(throttled)[0].cause == Cause.AT_LIMIT
    assert why(facts(vgpu=vgpu(busy_ratio=0.1), recent=Sums()))[0].cause == Cause.AS_PROMISED


def test_there_may_be_several_findings() -> None:
    found = why(facts(vgpu=vgpu(memory_refused_bytes=GIB), recent=hour(refusals=3, limited=3600)))
    assert [finding.cause for finding in found] == [Cause.MEMORY_FULL, Cause.AT_LIMIT]


def test_a_vgpu_that_bursts_has_no_limit() -> None:
    bursting = vgpu(limit_ratio=1.0, busy_ratio=0.9, spec=VgpuSpec(sm_percent=30, burst=True))
    assert why(facts(vgpu=bursting, recent=hour(used=3000)))[0].cause == Cause.AS_PROMISED


def test_a_notebook_with_a_program_in_it_is_idle_too() -> None:
    assert why(facts(vgpu=vgpu(**QUIET), recent=hour(used=0), idle_s=2000.0))[0].cause == Cause.IDLE
    assert why(facts(vgpu=vgpu(**QUIET), recent=hour(used=0), idle_s=600.0))[0].cause != Cause.IDLE


SECONDS = st.integers(0, 3600)


@given(
    st.sampled_from(["running", "idle", "waiting", "swapped", "failed", "moving", "starting", "suspended"]),
    st.builds(hour, used=SECONDS, limited=SECONDS, waiting=SECONDS, attached=SECONDS, refusals=SECONDS, swaps=SECONDS),
    st.floats(0, 1e6),
    st.floats(0, 1.5),
    st.floats(0.01, 1.0),
    st.integers(0, 3),
    st.none() | st.floats(1, 100),
)
def test_every_vgpu_has_one_to_three_findings_that_hold(
    state: Any, recent: Sums, idle_s: float, full: float, share: float, processes: int, advised: float | None
) -> None:
    one = vgpu(
        state=state,
        guarantee_ratio=share,
        limit_ratio=share,
        processes=processes,
        spec=VgpuSpec(sm_percent=max(1.0, share * 100)),
    )
    planted = facts(vgpu=one, gpu=gpu0(guaranteed_ratio=full), recent=recent, idle_s=idle_s, advised_percent=advised)
    found = why(planted)
    assert 1 <= len(found) <= 3
    for finding in found:
        assert finding.cause in set(Cause)
        assert finding.text.endswith(".")
        size = re.search(r"--sm (\d+)$", finding.command)
        if finding.cause == Cause.AT_LIMIT and size is not None:
            assert one.spec.compute_ratio * 100 < int(size[1]) <= 100
            assert share * int(size[1]) / (one.spec.compute_ratio * 100) - share <= 1 - full + 0.02
    assert all(isinstance(value, int | float) for value in figures(planted).values())
    assert len(FINDERS) == 9
