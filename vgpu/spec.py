"""What a person asks for: the specification of one vGPU, checked where it enters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from vgpu.bounds import BoundedRequest
from vgpu.enums import LeaseChoice, OnServerLoss, Oversubscribe, PriorityName
from vgpu.errors import MOST_COMPLAINTS, ErrorCode, VgpuError, cleaned, in_plain_words
from vgpu.protocol import building
from vgpu.protocol.triggers import CALL, OFF, canonical, in_order
from vgpu.units import (
    MIB,
    bounds,
    check_percent,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration_ns,
    parse_fraction,
    parse_percent,
    parse_slo,
    range_text,
)

SMALLEST_MEMORY_BYTES: Final = 64 * MIB  # less does not even hold a context
LARGEST_MEMORY_BYTES: Final = 1 << 50
SHORTEST_PERIOD_NS: Final = 5_000_000  # below, hand-overs eat what is shared
LONGEST_PERIOD_NS: Final = 1_000_000_000  # above, a program seems dead while others have their leases
# Below, the host cannot feed the GPU; above, a hand-over waits longer than the longest token lasts.
SHORTEST_WINDOW_NS: Final = 250_000
LONGEST_WINDOW_NS: Final = 100_000_000
LONGEST_DURATION_NS: Final = 100 * 365 * 86400 * 10**9  # an end stays within 64 bits until the year 2162
SHORTEST_IDLE_NS: Final = 1_000_000_000  # below, a program would wait for its memory more often than it works
LONGEST_GROUP: Final = 255
_LONGEST_MESSAGE: Final = 1000
_LIKE_ID: Final = re.compile(r"vgpu-.*|[0-9a-f]{8}", re.IGNORECASE)
NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")


def _percent(value: Any) -> Any:
    return parse_percent(value) if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    return parse_duration_ns(value) if isinstance(value, str) else value


def _fraction(value: Any) -> Any:
    return float(parse_fraction(value)) if isinstance(value, str) else value


def _checked_memory(value: int) -> int:
    if value < SMALLEST_MEMORY_BYTES:
        least = format_bytes(SMALLEST_MEMORY_BYTES)
        meant = f"; {value}G is {value} GiB" if 0 < value < 1024 else ""
        raise ValueError(f"{format_bytes(value)} does not hold a CUDA context: the least is {least}{meant}")
    if value > LARGEST_MEMORY_BYTES:
        raise ValueError(f"{format_bytes(value)} is more than any GPU has")
    return value


def _checked_duration(value: int) -> int:
    if value <= 0:
        raise ValueError(f"{format_duration(value) if value else 0} is no time: write 10ms, 90s, 8h or 1h30m")
    return _not_longest(value)


def _not_longest(value: int) -> int:
    if value > LONGEST_DURATION_NS:
        raise ValueError(f"{format_duration(value)} is more than {format_duration(LONGEST_DURATION_NS)}")
    return value


def _idle(value: Any) -> Any:
    return 0 if isinstance(value, str) and value.strip().lower() == "off" else _duration(value)


def _checked_idle(value: int) -> int:
    if value != 0 and value < SHORTEST_IDLE_NS:
        raise ValueError(f"{format_duration(value)} is less than {format_duration(SHORTEST_IDLE_NS)}; or: off")
    return _not_longest(value)


def _slo(value: Any) -> Any:
    return str(parse_slo(value)) if isinstance(value, str) else value


def checked_period(value: int) -> int:
    """``value`` (nanoseconds) if one round of leases may take that long; ``ValueError`` if not."""
    if not SHORTEST_PERIOD_NS <= value <= LONGEST_PERIOD_NS:
        shortest, longest = format_duration(SHORTEST_PERIOD_NS), format_duration(LONGEST_PERIOD_NS)
        raise ValueError(f"{format_duration(value)} is not between {shortest} and {longest}")
    return value


def checked_window(value: int) -> int:
    """``value`` (nanoseconds) if so much GPU time may be in flight; ``ValueError`` if not."""
    if not SHORTEST_WINDOW_NS <= value <= LONGEST_WINDOW_NS:
        shortest, longest = format_duration(SHORTEST_WINDOW_NS), format_duration(LONGEST_WINDOW_NS)
        raise ValueError(f"{format_duration(value)} is not between {shortest} and {longest}")
    return value


def _checked_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(
            f"{cleaned(value, 80)!r} is not a name: at most 63 letters, digits, '.', '_', '-', a letter or digit first"
        )
    if value.startswith("vgpu-"):
        raise ValueError(f"{value!r} looks like a vGPU id: choose a name that does not start with 'vgpu-'")
    return value


def _checked_group(value: str) -> str:
    """A group of any name service. Groups of directory services may have blanks and backslashes in their names."""
    if not 0 < len(value) <= LONGEST_GROUP or not value.isprintable() or ":" in value:
        raise ValueError(f"{cleaned(value, 80)!r} is not the name of a group")
    return value


def refuse_like_id(name: str | None) -> None:
    """``VgpuError`` (invalid): ``name`` could be the id of a vGPU, in one of the ways in which users type ids. Names
    from before this rule stay, so it is no part of ``Name``."""
    if name is not None and _LIKE_ID.fullmatch(name):
        raise VgpuError(
            ErrorCode.INVALID, f"--name: {name!r} looks like a vGPU's id", "choose one that is not 8 hexadecimal digits"
        )


Percent = Annotated[FiniteFloat, BeforeValidator(_percent), AfterValidator(check_percent)]
Memory = Annotated[int, BeforeValidator(_bytes), AfterValidator(_checked_memory)]
PercentRange = tuple[Percent, Percent]
MemoryRange = tuple[Memory, Memory]
DurationNs = Annotated[int, BeforeValidator(_duration), AfterValidator(_checked_duration)]
IdleNs = Annotated[int, BeforeValidator(_idle), AfterValidator(_checked_idle)]
PeriodNs = Annotated[int, BeforeValidator(_duration), AfterValidator(checked_period)]
WindowNs = Annotated[int, BeforeValidator(_duration), AfterValidator(checked_window)]
SloText = Annotated[str, BeforeValidator(_slo)]
"""As ``vgpu.units.Slo`` prints it; "": no targets."""
Part = Annotated[FiniteFloat, BeforeValidator(_fraction), Field(gt=0, le=1)]
Name = Annotated[str, AfterValidator(_checked_name)]
Group = Annotated[str, AfterValidator(_checked_group)]


def _triggers(value: Any) -> Any:
    """One trigger or several; ``off``: none."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in several):
        return value
    said = [one for one in several if one.strip().lower() != OFF]
    if len(said) < len(several) and said:
        raise ValueError(f"{OFF} means none: leave out the others, or leave out {OFF}")
    return in_order(map(canonical, said))


def _ports_alone(value: tuple[str, ...]) -> tuple[str, ...]:
    if CALL in value:
        raise ValueError("an idle vGPU comes back with a CUDA call anyway: give tcp: and a port, as in tcp:8000")
    return value


Triggers = Annotated[tuple[str, ...], BeforeValidator(_triggers)]
"""``call``, ``tcp:8000``: what resumes a suspended vGPU (``vgpu.protocol.triggers``)."""
PortTriggers = Annotated[Triggers, AfterValidator(_ports_alone)]


RANGES: Final = {"sm_percent": "sm_range_percent", "memory_bytes": "memory_range_bytes"}
"""Sizes that the node may change between two bounds, and the fields of these bounds."""


def _without_what_is_newer(fields: dict[str, Any], no_slo: str | None) -> dict[str, Any]:
    """A node of an older release does not know these fields."""
    absent = dict.fromkeys((*RANGES.values(), "resume_on")) | {"slo": no_slo}
    return {name: value for name, value in fields.items() if name not in absent or value != absent[name]}


def _check_order(sm: PercentRange | None, memory: MemoryRange | None) -> None:
    if sm is not None and sm[0] >= sm[1]:
        raise ValueError(f"--sm {sm[0]:g}..{sm[1]:g}: write the lower bound first, as in 20..60")
    if memory is not None and memory[0] >= memory[1]:
        least, most = map(format_bytes, memory)
        raise ValueError(f"--mem from {least} to {most}: write the lower bound first, as in 8G..16G")


class VgpuSpec(BoundedRequest):
    """One vGPU as asked for. Texts (``8G``, ``30%``, ``1/4``, ``8h``) and plain numbers are both understood.

    ``sm_percent``      percent of the GPU's compute. Temporal mode: a share of its time; spatial: of its SMs.
    ``memory_bytes``    device memory the vGPU may own; without it, the same part of the card as ``sm_percent``.
    ``sm_range_percent``, ``memory_range_bytes``  the node changes these sizes within the bounds, by demand; the lower
                        one is guaranteed. ``sm_percent="20..60"`` sets the bounds, and the present size to the lower.
    ``memory_limit_bytes``  the most it may have while no vGPU was promised that (None: ``memory_bytes``).
    ``process_memory_bytes``  the most that one process may allocate (None: as much as the vGPU has).
    ``oversubscribe``   its plain allocations need not fit the card: swapped, or managed memory; for its life.
    ``fraction``        that part of compute and memory both; ``sm_percent`` and ``memory_bytes`` go before it.
    ``quota_request_percent``  guaranteed part of the time, on top of the SM share (default: the limit).
    ``quota_limit_percent``    largest part of the time (default 100).
    ``burst``           idle capacity may be used beyond the share.
    ``overcommit``      admit it although guarantees no longer fit: compute shares become weights.
    ``lease``           in temporal mode: beside other light vGPUs, or always by itself.
    ``slo``             latency targets, as in ``tpot=30ms,ttft=500ms``; of a class, what is due first goes first.
    ``ttl_ns``          removed that long after creation (None: never).
    ``idle_suspend_ns``  suspended when no program has used it for so long, until one wants to (0: never).
    ``resume_on``       ports: while it is idle-suspended, a connection to one of them resumes it, too.
    ``share_group``     members of this Unix group may attach, besides the owner.
    ``group``           vGPUs of one owner with this name hold at the same time, each on a GPU of its own.

    Errors: ``pydantic.ValidationError``; ``VgpuSpec.parse`` turns it into a ``VgpuError`` of one sentence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=building.deferred)

    sm_percent: Percent | None = None
    memory_bytes: Memory | None = None
    sm_range_percent: PercentRange | None = None
    memory_range_bytes: MemoryRange | None = None
    memory_limit_bytes: Memory | None = None
    process_memory_bytes: Memory | None = None
    fraction: Part | None = None
    quota_request_percent: Percent | None = None
    quota_limit_percent: Percent = 100.0
    burst: bool = False
    overcommit: bool = False
    priority: PriorityName = PriorityName.NORMAL
    oversubscribe: Oversubscribe | None = None
    lease: LeaseChoice = LeaseChoice.AUTO
    slo: SloText = ""
    on_server_loss: OnServerLoss = OnServerLoss.BLOCK
    name: Name | None = None
    ttl_ns: DurationNs | None = None
    idle_suspend_ns: IdleNs = 0
    resume_on: PortTriggers = ()
    share_group: Group | None = None
    group: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_ranges(cls, fields: Any) -> Any:
        """``20..60`` as bounds, and a size at the lower one."""
        for size, both in RANGES.items():
            if isinstance(fields, Mapping) and (found := bounds(fields.get(size))):
                fields = {**fields, size: found[0], both: found}
        return fields

    @model_serializer(mode="wrap")  # with the type of its result, the JSON schema would be that type's
    def _without_what_is_not_there(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        fields = _without_what_is_newer(serialize(self), "")
        if not self.resume_on:
            fields.pop("resume_on", None)
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> VgpuSpec:
        if self.sm_percent is None and self.fraction is None:
            raise ValueError("how much compute is missing: give --sm 30 (percent), or --fraction 1/4")
        if self.fraction is not None and self.sm_percent is None and self.fraction < 0.01:
            raise ValueError(f"a fraction of {self.fraction:g} is less than 1 percent of a GPU")
        self._check_memory()
        self._check_ranges()
        if self.resume_on and not self.idle_suspend_ns:
            raise ValueError(
                "--resume-on is for a vGPU that is suspended when it is idle: give --idle-suspend 10m, too"
            )
        if self.quota_request_percent is not None and self.quota_request_percent > self.quota_limit_percent:
            asked, limit = self.quota_request_percent, self.quota_limit_percent
            raise ValueError(f"--quota-request {asked:g} is more than --quota-limit {limit:g}")
        if self.idle_suspend_ns and self.oversubscribe is Oversubscribe.MANAGED:
            raise ValueError("the driver suspends no program with managed memory: --idle-suspend does not go with it")
        return self

    def _check_ranges(self) -> None:
        sm, memory = self.sm_range_percent, self.memory_range_bytes
        _check_order(sm, memory)
        if sm is not None and (self.sm_percent is None or not sm[0] <= self.sm_percent <= sm[1]):
            raise ValueError(f"--sm {sm[0]:g}..{sm[1]:g} has bounds, and the present size is not between them")
        if memory is not None and (self.memory_bytes is None or not memory[0] <= self.memory_bytes <= memory[1]):
            raise ValueError("--mem has bounds, and the present size is not between them")
        other = next((option for option, given in self._opposed() if given), None)
        if other is not None and (sm is not None or memory is not None):
            which = "--sm" if sm is not None else "--mem"
            raise ValueError(
                f"{which} with two bounds and {other} exclude each other: the node sets the size by demand, and "
                f"{other} would set it by another rule"
            )

    def _opposed(self) -> tuple[tuple[str, bool], ...]:
        """Options that do not go with a range, and whether each is given."""
        return (
            ("--quota-request", self.quota_request_percent is not None),
            ("--quota-limit", self.quota_limit_percent != 100),
            ("--burst", self.burst),
            ("--overcommit", self.overcommit),
            ("--mem-limit", self.memory_limit_bytes is not None),
            ("--oversubscribe", self.oversubscribe is not None and self.memory_range_bytes is not None),
        )

    @property
    def scales(self) -> bool:
        """Whether the node changes its size by demand."""
        return self.sm_range_percent is not None or self.memory_range_bytes is not None

    def _check_memory(self) -> None:
        limit, least = self.memory_limit_bytes, self.memory_bytes
        if limit is not None and least is not None and limit < least:
            raise ValueError(f"--mem-limit {format_bytes(limit)} is less than --mem {format_bytes(least)}")
        if limit is not None and self.oversubscribe is not None:
            raise ValueError("--mem-limit is for memory on the card, and --oversubscribe for memory that need not fit")
        if self.share_group is not None and self.oversubscribe is Oversubscribe.SWAP:
            raise ValueError("--share-group would show what is swapped to host memory to the group's other programs")
        most, own = limit or least, self.process_memory_bytes
        most = self.memory_range_bytes[1] if self.memory_range_bytes is not None else most
        if most is not None and own is not None and own > most:
            raise ValueError(f"--mem-per-process {format_bytes(own)} is more than the {format_bytes(most)} of the vGPU")

    @classmethod
    def parse(cls, **fields: Any) -> VgpuSpec:
        """The specification in ``fields`` (None counts as not given); ``VgpuError`` (invalid) says what is wrong."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise VgpuError(ErrorCode.INVALID, explain(error)) from error

    @property
    def compute_ratio(self) -> float:
        """``sm_percent`` as a ratio, 0–1."""
        if self.sm_percent is not None:
            return self.sm_percent / 100
        assert self.fraction is not None
        return self.fraction

    @property
    def quota_request_ratio(self) -> float:
        """Guaranteed part of the time, 0–1."""
        request = self.quota_limit_percent if self.quota_request_percent is None else self.quota_request_percent
        return request / 100

    def memory_on(self, total_memory_bytes: int) -> int:
        """The memory in bytes that it is promised on a card of ``total_memory_bytes``."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        part = self.compute_ratio if self.fraction is None else self.fraction
        if self.fraction is None and self.sm_range_percent is not None:
            part = self.sm_range_percent[0] / 100  # compute that comes and goes takes no memory with it
        # Whole MiB, rounded down: n times 1/n of a card must fit it.
        return int(total_memory_bytes * part) // MIB * MIB


class VgpuChanges(BoundedRequest):
    """``vgpuctl set``: the fields that are given replace those of the specification; None leaves one as it is.

    A size without bounds ends the bounds that it had. Bounds without a size keep the present one, moved between them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=building.deferred)

    sm_percent: Percent | None = None
    memory_bytes: Memory | None = None
    sm_range_percent: PercentRange | None = None
    memory_range_bytes: MemoryRange | None = None
    memory_limit_bytes: Memory | None = None
    process_memory_bytes: Memory | None = None
    quota_request_percent: Percent | None = None
    quota_limit_percent: Percent | None = None
    burst: bool | None = None
    overcommit: bool | None = None
    priority: PriorityName | None = None
    lease: LeaseChoice | None = None
    slo: SloText | None = None
    on_server_loss: OnServerLoss | None = None
    name: Name | None = None
    ttl_ns: DurationNs | None = None
    idle_suspend_ns: IdleNs | None = None
    resume_on: PortTriggers | None = None

    @classmethod
    def parse(cls, **fields: Any) -> VgpuChanges:
        """The changes in ``fields``; ``VgpuError`` (invalid) says what is wrong."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise VgpuError(ErrorCode.INVALID, explain(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _with_ranges(cls, fields: Any) -> Any:
        for size, both in RANGES.items():
            if isinstance(fields, Mapping) and (found := bounds(fields.get(size))):
                fields = {**fields, size: None, both: found}
        return fields

    @model_serializer(mode="wrap")  # with the type of its result, the JSON schema would be that type's
    def _without_what_is_not_there(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        return _without_what_is_newer(serialize(self), None)

    @model_validator(mode="after")
    def _consistent(self) -> VgpuChanges:
        _check_order(self.sm_range_percent, self.memory_range_bytes)
        return self

    @property
    def scales(self) -> bool:
        """Whether it gives bounds, which an older node does not know."""
        return self.sm_range_percent is not None or self.memory_range_bytes is not None

    def applied_to(self, spec: VgpuSpec) -> VgpuSpec:
        """``spec`` with the changes; ``VgpuError`` (invalid) where the result contradicts itself."""
        fields = spec.model_dump() | self.model_dump(exclude_none=True)
        if self.sm_range_percent is not None and self.sm_percent is None:
            least, most = self.sm_range_percent
            fields["sm_percent"] = min(max(spec.compute_ratio * 100, least), most)
        elif self.sm_percent is not None and self.sm_range_percent is None:
            fields["sm_range_percent"] = None
        if self.memory_range_bytes is not None and self.memory_bytes is None:
            lower, upper = self.memory_range_bytes
            fields["memory_bytes"] = min(max(spec.memory_bytes or lower, lower), upper)
        elif self.memory_bytes is not None and self.memory_range_bytes is None:
            fields["memory_range_bytes"] = None
        if self.idle_suspend_ns == 0 and self.resume_on is None:
            fields["resume_on"] = ()
        return VgpuSpec.parse(**fields)


_OPTION: Final = {
    "sm_percent": "--sm",
    "memory_bytes": "--mem",
    "sm_range_percent": "--sm",
    "memory_range_bytes": "--mem",
    "memory_limit_bytes": "--mem-limit",
    "process_memory_bytes": "--mem-per-process",
    "fraction": "--fraction",
    "quota_request_percent": "--quota-request",
    "quota_limit_percent": "--quota-limit",
    "priority": "--priority",
    "oversubscribe": "--oversubscribe",
    "lease": "--lease",
    "slo": "--slo",
    "on_server_loss": "--on-server-loss",
    "name": "--name",
    "group": "--group",
    "share_group": "--share-group",
    "ttl_ns": "--ttl",
    "idle_suspend_ns": "--idle-suspend",
    "resume_on": "--resume-on",
    "resume_at_unix_s": "--resume-at",
    "period_ns": "--period",
    "window_ns": "--window",
}

_WHOLE: Final = frozenset({"spec", "changes"})
"""Fields of a request. A complaint about one of them as a whole names the options itself."""


def as_options(fields: Mapping[str, Any]) -> str:
    """Those of ``fields`` that describe a vGPU, but for its name, as they are typed: ``--sm 30 --mem 8GiB``."""
    said = []
    for field, value in fields.items():
        if field not in VgpuSpec.model_fields or field == "name" or RANGES.get(field) in fields:
            continue
        option = _OPTION.get(field, f"--{field.replace('_', '-')}")
        if field in RANGES.values():
            said.append(f"{option} {range_text(value, is_size=field.endswith('_bytes'))}")
        elif field == "resume_on":  # in an event it is a text
            said += [f"{option} {trigger}" for trigger in (value.split(", ") if isinstance(value, str) else value)]
        elif field in {"slo", "idle_suspend_ns"} and not value:
            said.append(f"{option} {OFF}")
        elif field.endswith("_bytes"):
            said.append(f"{option} {format_bytes(int(value)).replace(' ', '')}")
        elif field.endswith("_ns"):
            said.append(f"{option} {format_duration(int(value))}")
        elif VgpuSpec.model_fields[field].annotation is bool:
            said += [option] if value else []
        else:
            said.append(f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}")
    return " ".join(said)


def explain(error: ValidationError) -> str:
    """Complaints of pydantic on one line, each under the option or field a person knows; the first few of them."""
    return in_one_line(error.errors(include_url=False, include_context=False, include_input=False))


def in_one_line(problems: Iterable[Mapping[str, Any]]) -> str:
    """The same of complaints (``loc``, ``msg``) that came another way."""
    complaints: dict[str, None] = {}
    for problem in problems:
        field = next((str(part) for part in reversed(problem["loc"]) if isinstance(part, str)), "")
        field = "" if field in _WHOLE else field
        reason = in_plain_words(problem["msg"][:_LONGEST_MESSAGE])
        complaints[cleaned(f"{_OPTION.get(field, field)}: {reason}" if field else reason)] = None
        if len(complaints) > MOST_COMPLAINTS:
            complaints.popitem()
            return "; ".join([*complaints, "and more"])
    return "; ".join(complaints)
