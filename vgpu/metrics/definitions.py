"""Every metric, described once: its name, kind and labels, its meaning, and how it is taken from the node's readings.

``/metrics``, the table in ``docs/reference/metrics.md`` and the tests are made from ``METRICS``. All of it is pure.

A name contains its unit, always a base unit: ``_seconds``, ``_bytes``, ``_watts``, ``_celsius``, ``_hertz``, ``_ratio``
(0–1). A counter's ends with ``_total``. The prefixes ``vgpu_gpu_``, ``vgpu_process_``, ``vgpu_user_``,
``vgpu_node_`` and ``vgpu_exporter_`` name the subject; ``vgpu_`` alone: a vGPU.

The last readings of a GPU Server that does not answer are no measurement. So a metric is left out until the server
answers again (``vgpu_gpu_up``), unless it is ``lasting``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

from vgpu.integrations.claims import Claim
from vgpu.metrics.kinds import Gpu, Kind, Metric, Of, Seen, Taken, Values, Vgpu
from vgpu.protocol.messages import GpuStatus, ProcessReading, Steps, VgpuStatus
from vgpu.protocol.usage import UserUsage

SECOND_NS: Final = 1_000_000_000
LONGEST_COMMAND: Final = 80
COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM


def _node(name: str, kind: Kind, text: str, take: Callable[[Seen], Taken], *labels: str) -> Metric[Seen]:
    return Metric(f"vgpu_node_{name}", Of.NODE, kind, text, take, labels, lasting=True)


def _gpu(
    name: str, kind: Kind, text: str, take: Callable[[Gpu], Taken], *labels: str, lasting: bool = False
) -> Metric[Gpu]:
    return Metric(f"vgpu_gpu_{name}", Of.GPU, kind, text, take, labels, lasting)


def _vgpu(
    name: str, kind: Kind, text: str, take: Callable[[Vgpu], Taken], *labels: str, lasting: bool = False
) -> Metric[Vgpu]:
    return Metric(f"vgpu_{name}", Of.VGPU, kind, text, take, labels, lasting)


def _process(
    name: str, kind: Kind, text: str, take: Callable[[ProcessReading], Taken], *labels: str
) -> Metric[ProcessReading]:
    return Metric(f"vgpu_process_{name}", Of.PROCESS, kind, text, take, labels)


def _user(name: str, text: str, take: Callable[[UserUsage], Taken]) -> Metric[UserUsage]:
    return Metric(f"vgpu_user_{name}_total", Of.USER, Kind.COUNTER, text, take, lasting=True)


def _exporter(name: str, kind: Kind, text: str, take: Callable[[Seen], Taken], *labels: str) -> Metric[Seen]:
    return Metric(f"vgpu_exporter_{name}", Of.EXPORTER, kind, text, take, labels, lasting=True)


def _says(*values: str) -> Values:
    """Of an info metric: all that it has to say is in its labels."""
    return ((values, 1.0),)


def _states(model: type[GpuStatus] | type[VgpuStatus]) -> Callable[[str], Values]:
    """A series for each state there is: 1 for the one that it is in."""
    known: tuple[str, ...] = get_args(model.model_fields["state"].annotation)
    return {now: tuple(((state,), float(state == now)) for state in known) for now in known}.__getitem__


def _claim(claim: Claim | None) -> Values | None:
    """Nothing where no engine asked."""
    if claim is None:
        return None
    return _says(claim.kind, *(readable(claim.labels.get(name, "")) for name in ("namespace", "pod", "container")))


def _steps(steps: Steps) -> Values:
    """A series for each kind and result."""
    return tuple(
        ((kind, result), float(getattr(steps, f"{kind}_{result}")))
        for kind in ("tpot", "ttft")
        for result in ("attained", "missed")
    )


def readable(text: str) -> str:
    """A tenant's text as a label: one line of printable letters, at most ``LONGEST_COMMAND`` of them."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= LONGEST_COMMAND else line[: LONGEST_COMMAND - 1] + "…"


_gpu_states, _vgpu_states = _states(GpuStatus), _states(VgpuStatus)

NODE: Final[tuple[Metric[Seen], ...]] = (
    _node("up", GAUGE, "1 if the node answers; 0: nothing else is known of it.", lambda n: n.metering is not None),
    _node(
        "info",
        GAUGE,
        "1, with the version of st-vgpu that the node runs.",
        lambda n: None if n.metering is None else _says(n.software),
        "version",
    ),
    _node(
        "waiting_requests",
        GAUGE,
        "Requests for a vGPU that wait for room in the node's queue.",
        lambda n: None if n.metering is None else n.metering.waiting,
    ),
)

GPU: Final[tuple[Metric[Gpu], ...]] = (
    _gpu(
        "up",
        GAUGE,
        "1 if the GPU's server answers; 0: what it measures is left out until it does.",
        lambda g: g.fresh,
        lasting=True,
    ),
    _gpu(
        "info",
        GAUGE,
        "1, with what the GPU is and how it is shared.",
        lambda g: _says(g.reading.uuid, g.reading.name, g.reading.mode, "yes" if g.reading.simulated else "no"),
        *("gpu_uuid", "gpu_name", "mode", "simulated"),
        lasting=True,
    ),
    _gpu(
        "state",
        GAUGE,
        "1 for the state that the GPU is in, 0 for the others.",
        lambda g: _gpu_states(g.reading.state),
        "state",
        lasting=True,
    ),
    _gpu(
        "server_restarts_total",
        COUNTER,
        "GPU Servers that were started because one had ended, since the node began.",
        lambda g: g.reading.restarts,
        lasting=True,
    ),
    _gpu("vgpus", GAUGE, "vGPUs on the GPU.", lambda g: g.reading.vgpus),
    _gpu("processes", GAUGE, "Processes in its vGPUs.", lambda g: g.reading.processes),
    _gpu("sms", GAUGE, "Streaming multiprocessors of the GPU.", lambda g: g.reading.sm_count),
    _gpu(
        "guaranteed_ratio",
        GAUGE,
        "Compute promised to its vGPUs: the sum of guarantees (temporal mode), or the best packing (spatial).",
        lambda g: g.reading.guaranteed_ratio,
    ),
    _gpu(
        "held_ratio",
        GAUGE,
        "Part of the last second in which vGPUs held tokens, summed over them: more than 1 where several hold at once.",
        lambda g: g.reading.held_ratio,
    ),
    _gpu(
        "busy_ratio",
        GAUGE,
        "Part of the last second in which vGPUs had work on the GPU, summed over them.",
        lambda g: g.reading.busy_ratio,
    ),
    _gpu("period_seconds", GAUGE, "Length of one round of turns.", lambda g: g.reading.period_ns / SECOND_NS),
    _gpu(
        "window_seconds",
        GAUGE,
        "The most predicted GPU time that a process may have in flight while others want the GPU.",
        lambda g: g.reading.window_ns / SECOND_NS,
    ),
    _gpu(
        "handover_gap_seconds",
        HISTOGRAM,
        "From one vGPU's drain to the next one's GO, where the next one was waiting.",
        lambda g: None if g.meters is None else g.meters.handovers,
    ),
    _gpu(
        "server_loop_lag_seconds",
        HISTOGRAM,
        "How late the GPU Server's loop came to what was due.",
        lambda g: None if g.meters is None else g.meters.loop_lag,
    ),
    _gpu("memory_size_bytes", GAUGE, "Memory of the card.", lambda g: g.reading.total_memory_bytes),
    _gpu("memory_used_bytes", GAUGE, "Of that in use in all, as NVML says.", lambda g: g.reading.used_memory_bytes),
    _gpu("memory_guaranteed_bytes", GAUGE, "Of that promised to vGPUs.", lambda g: g.reading.guaranteed_memory_bytes),
    _gpu(
        "outside_memory_bytes",
        GAUGE,
        "Memory of processes on the GPU that are in no vGPU: nothing here limits them.",
        lambda g: sum(process.memory_bytes for process in g.reading.outside),
    ),
    _gpu("outside_processes", GAUGE, "Processes on the GPU that are in no vGPU.", lambda g: len(g.reading.outside)),
    _gpu(
        "host_memory_limit_bytes",
        GAUGE,
        "The most host memory that what is swapped out may have.",
        lambda g: g.reading.host_memory_limit_bytes,
    ),
    _gpu("host_memory_bytes", GAUGE, "Host memory set aside for that.", lambda g: g.reading.host_memory_bytes),
    _gpu(
        "host_memory_used_bytes",
        GAUGE,
        "Host memory with swapped memory in it.",
        lambda g: g.reading.host_memory_used_bytes,
    ),
    _gpu(
        "utilization_ratio",
        GAUGE,
        "Part of the time with any kernel on the GPU, over NVML's own last sample.",
        lambda g: g.reading.utilization_ratio,
    ),
    _gpu(
        "memory_utilization_ratio",
        GAUGE,
        "Part of the time in which its memory was read or written, over NVML's own last sample.",
        lambda g: g.reading.memory_utilization_ratio,
    ),
    _gpu("power_watts", GAUGE, "Power that the card draws.", lambda g: g.reading.power_w),
    _gpu("temperature_celsius", GAUGE, "Temperature of the GPU.", lambda g: g.reading.temperature_c),
    _gpu(
        "sm_clock_hertz",
        GAUGE,
        "Clock of the SMs.",
        lambda g: None if g.reading.sm_clock_mhz is None else g.reading.sm_clock_mhz * 1e6,
    ),
    _gpu(
        "mps_up",
        GAUGE,
        "1 if the GPU's MPS daemon runs; in spatial mode only.",
        lambda g: None if g.reading.mode == "temporal" else g.reading.mps_pid is not None,
    ),
    _gpu(
        "mps_restarts_total",
        COUNTER,
        "MPS daemons that were started because one had died, since the GPU Server began.",
        lambda g: g.reading.mps_restarts,
    ),
)

VGPU: Final[tuple[Metric[Vgpu], ...]] = (
    _vgpu(
        "info",
        GAUGE,
        "1, with what the vGPU is.",
        lambda v: _says(
            v.reading.gpu_uuid, v.reading.mode, v.reading.spec.priority, v.reading.spec.group or "", v.user
        ),
        *("gpu_uuid", "mode", "priority", "group", "user"),
        lasting=True,
    ),
    _vgpu(
        "claim_info",
        GAUGE,
        "1, with the engine that asked for the vGPU, and where its programs run.",
        lambda v: _claim(v.reading.claim),
        *("kind", "namespace", "pod", "container"),
        lasting=True,
    ),
    _vgpu(
        "state",
        GAUGE,
        "1 for the state that the vGPU is in, 0 for the others.",
        lambda v: _vgpu_states(v.reading.state),
        "state",
        lasting=True,
    ),
    _vgpu(
        "created_timestamp_seconds",
        GAUGE,
        "When it was made, in seconds since 1970.",
        lambda v: v.reading.created_unix_s,
        lasting=True,
    ),
    _vgpu("tokens_total", COUNTER, "Tokens that it has had: leases that are over.", lambda v: v.reading.tokens),
    _vgpu(
        "open_ended",
        GAUGE,
        "1 while it holds a token without an end, as no vGPU waits for the GPU: vgpu_tokens_total stands still then.",
        lambda v: v.reading.open_ended,
    ),
    _vgpu(
        "shared",
        GAUGE,
        "1 while it holds a shared token: other vGPUs compute at the same time.",
        lambda v: v.reading.shares,
    ),
    _vgpu(
        "demand_ratio",
        GAUGE,
        "The part of their time in which its programs need the GPU, of which it is light or heavy; 0: not measured.",
        lambda v: v.reading.demand_ratio,
    ),
    _vgpu(
        "burst_seconds",
        GAUGE,
        "The GPU time of what its programs launch between two waits for the GPU: long bursts make it heavy.",
        lambda v: v.reading.burst_ns / SECOND_NS,
    ),
    _vgpu(
        "slo_steps_total",
        COUNTER,
        "Decode steps (tpot) and prefills (ttft) that its latency targets (--slo) judged: attained or missed.",
        lambda v: _steps(v.reading.steps) if v.reading.spec.slo else None,
        *("kind", "result"),
    ),
    _vgpu(
        "slo_tpot_seconds",
        GAUGE,
        "Time of a decode step: the moving average of the last ones; 0: none was counted.",
        lambda v: v.reading.steps.tpot_mean_ns / SECOND_NS if v.reading.spec.slo else None,
    ),
    _vgpu(
        "token_seconds_total",
        COUNTER,
        "Time for which it held a usable token, until drained or returned: what others could not use.",
        lambda v: v.reading.held_ns / SECOND_NS,
    ),
    _vgpu(
        "busy_seconds_total",
        COUNTER,
        "Time with its work on the GPU: what its limit caps.",
        lambda v: v.reading.busy_ns / SECOND_NS,
    ),
    _vgpu(
        "overuse_seconds_total",
        COUNTER,
        "Time for which its work ran past the ends of its leases.",
        lambda v: v.reading.overuse_ns / SECOND_NS,
    ),
    _vgpu(
        "lag_seconds", GAUGE, "GPU time that it is owed; below 0: that it owes.", lambda v: v.reading.lag_ns / SECOND_NS
    ),
    _vgpu(
        "debt_seconds",
        GAUGE,
        "GPU time that it owes: its turns come later until that is paid.",
        lambda v: max(0, -v.reading.lag_ns) / SECOND_NS,
    ),
    _vgpu("held_ratio", GAUGE, "Part of the last second in which it held a token.", lambda v: v.reading.held_ratio),
    _vgpu(
        "busy_ratio", GAUGE, "Part of the last second in which it had work on the GPU.", lambda v: v.reading.busy_ratio
    ),
    _vgpu(
        "guarantee_ratio",
        GAUGE,
        "Part of the time that it is promised: of the GPU's (temporal mode), or on its SMs (spatial).",
        lambda v: v.reading.guarantee_ratio,
    ),
    _vgpu("limit_ratio", GAUGE, "The largest part of the time that it may use.", lambda v: v.reading.limit_ratio),
    _vgpu(
        "sm_ratio",
        GAUGE,
        "Part of the SMs that it may occupy at once: 1 in temporal mode.",
        lambda v: v.reading.sm_percent_granted / 100,
    ),
    _vgpu(
        "replicas_wanted",
        GAUGE,
        "Replicas that its service needs more: its demand is beyond its bounds, or beyond what the node has left.",
        lambda v: v.reading.replicas_wanted,
    ),
    _vgpu("throttled", GAUGE, "1 while it is kept waiting because it is at its limit.", lambda v: v.reading.throttled),
    _vgpu(
        "wants",
        GAUGE,
        "1 while one of its processes waits for a token, or holds one and has work.",
        lambda v: v.reading.wants,
    ),
    _vgpu(
        "waiting_seconds",
        GAUGE,
        "For how long it has wanted a token by now without having one; 0: it does not.",
        lambda v: v.reading.waiting_ns / SECOND_NS,
    ),
    _vgpu(
        "wait_seconds",
        HISTOGRAM,
        "From wanting a token without having one, to GO.",
        lambda v: None if v.meters is None else v.meters.waits,
    ),
    _vgpu(
        "window_seconds",
        GAUGE,
        "The most predicted GPU time that one of its processes may have in flight while others want the GPU.",
        lambda v: v.reading.window_ns / SECOND_NS,
    ),
    _vgpu("launches_total", COUNTER, "Kernels, graphs, fills and copies launched.", lambda v: v.reading.launches),
    _vgpu("processes", GAUGE, "Processes in it.", lambda v: v.reading.processes),
    _vgpu("memory_limit_bytes", GAUGE, "Memory that it may have.", lambda v: v.reading.memory_limit_bytes),
    _vgpu(
        "memory_used_bytes",
        GAUGE,
        "Memory charged to it: allocated, being allocated, and implicit.",
        lambda v: v.reading.memory_used_bytes,
    ),
    _vgpu(
        "memory_implicit_bytes",
        GAUGE,
        "Of that contexts, modules and stacks, which cannot be refused.",
        lambda v: v.reading.memory_implicit_bytes,
    ),
    _vgpu(
        "memory_away_bytes", GAUGE, "Of that swapped out to the host's memory.", lambda v: v.reading.memory_away_bytes
    ),
    _vgpu(
        "memory_shared_bytes",
        GAUGE,
        "Of that shared with processes that are not charged with it.",
        lambda v: v.reading.memory_shared_bytes,
    ),
    _vgpu(
        "memory_imported_bytes",
        GAUGE,
        "Beside that what its processes have of memory that another vGPU is charged with.",
        lambda v: v.reading.memory_imported_bytes,
    ),
    _vgpu(
        "memory_peak_bytes",
        GAUGE,
        "Sum of the most that each of its processes has had, of what it allocates and of what is implicit.",
        lambda v: v.reading.memory_peak_bytes,
    ),
    _vgpu(
        "memory_refusals_total",
        COUNTER,
        "Allocations refused at the limit, each an out-of-memory error of a program.",
        lambda v: v.reading.memory_refusals,
    ),
    _vgpu(
        "memory_refused_bytes",
        GAUGE,
        "Size of an allocation that was refused: the largest of its processes' last ones.",
        lambda v: v.reading.memory_refused_bytes,
    ),
    _vgpu("swaps_out_total", COUNTER, "Moves of its memory to the host's.", lambda v: v.reading.swaps_out),
    _vgpu("swaps_in_total", COUNTER, "Moves of its memory back to the card.", lambda v: v.reading.swaps_in),
    _vgpu(
        "warnings",
        GAUGE,
        "What is not as one would expect just now; vgpuctl inspect says it in words.",
        lambda v: len(v.reading.warnings),
    ),
)

PROCESS: Final[tuple[Metric[ProcessReading], ...]] = (
    _process(
        "info",
        GAUGE,
        f"1, with the process's command, at most {LONGEST_COMMAND} letters of it.",
        lambda p: _says(readable(p.command)),
        "command",
    ),
    _process("busy_seconds_total", COUNTER, "GPU time of its work.", lambda p: p.busy_ns / SECOND_NS),
    _process(
        "overrun_seconds_total",
        COUNTER,
        "Time for which its work ran past the ends of leases.",
        lambda p: p.overrun_ns / SECOND_NS,
    ),
    _process("launches_total", COUNTER, "Kernels, graphs, fills and copies launched.", lambda p: p.launches),
    _process("graph_launches_total", COUNTER, "Graphs launched.", lambda p: p.graph_launches),
    _process("gate_waits_total", COUNTER, "Launches that had to wait at the gate.", lambda p: p.gate_waits),
    _process(
        "gate_wait_seconds_total",
        COUNTER,
        "Time for which launches waited at the gate: for a token, or for room in the window.",
        lambda p: p.gate_wait_ns / SECOND_NS,
    ),
    _process(
        "longest_kernel_seconds",
        GAUGE,
        "The longest kernel or graph of it that was timed.",
        lambda p: p.longest_kernel_ns / SECOND_NS,
    ),
    _process("copies_total", COUNTER, "Copies to and from the host.", lambda p: p.copies),
    _process("copied_bytes_total", COUNTER, "Bytes copied to and from the host.", lambda p: p.copied_bytes),
    _process("memory_bytes", GAUGE, "Memory that it has allocated, or is allocating.", lambda p: p.memory_bytes),
    _process("memory_implicit_bytes", GAUGE, "Its contexts, modules and stacks.", lambda p: p.memory_implicit_bytes),
    _process("memory_peak_bytes", GAUGE, "The most that it has had.", lambda p: p.memory_peak_bytes),
    _process("memory_refusals_total", COUNTER, "Its allocations refused at the limit.", lambda p: p.memory_refusals),
)

EXPORTER: Final[tuple[Metric[Seen], ...]] = (
    _exporter(
        "info", GAUGE, "1, with the exporter's own version of st-vgpu.", lambda n: _says(n.own_software), "version"
    ),
    _exporter(
        "scrape_seconds",
        GAUGE,
        "What this scrape took up to this line: asking the node, and writing down what it said.",
        lambda n: n.elapsed_s(),
    ),
)

USER: Final[tuple[Metric[UserUsage], ...]] = (
    _user(
        "promised_gpu_seconds",
        "Time of a whole GPU that was promised to the user's vGPUs, also to those that are gone.",
        lambda u: u.promised_ns / SECOND_NS,
    ),
    _user(
        "used_gpu_seconds",
        "Time of a whole GPU that the user's vGPUs used, also beyond their promise.",
        lambda u: u.used_ns / SECOND_NS,
    ),
    _user(
        "wasted_gpu_seconds",
        "Time of a whole GPU that was promised to the user's vGPUs, and that they did not use.",
        lambda u: u.wasted_ns / SECOND_NS,
    ),
    _user(
        "memory_promised_byte_seconds",
        "Memory that was promised to the user's vGPUs, times how long.",
        lambda u: u.memory_promised_kib_s * 1024,
    ),
    _user(
        "memory_used_byte_seconds",
        "Memory that the user's vGPUs had, times how long.",
        lambda u: u.memory_used_kib_s * 1024,
    ),
)

METRICS: Final[tuple[Metric[Any], ...]] = (*NODE, *GPU, *VGPU, *PROCESS, *USER, *EXPORTER)
"""In the order of the exposition: the last one says how long all of it took."""
