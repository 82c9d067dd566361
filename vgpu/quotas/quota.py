"""The sections ``[quota]``, ``[quota.user.NAME]``, ``[quota.group.NAME]`` and ``[quota.claim.KIND]``.

Each key of a quota may be left out. For a user, each key has the value of the first of these that has it:

1. the user's own section, by name or uid;
2. the sections of the user's groups; of several values the most generous;
3. ``[quota]``, which is for everyone.

Root and the node's own user have only a section of their own. A section of a claim kind limits all vGPUs that engines
of that kind ask for, of all users together; it holds beside the user's quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vgpu.bounds import BoundedRequest
from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError, in_plain_words
from vgpu.integrations.claims import Kind
from vgpu.protocol import building
from vgpu.spec import DurationNs, IdleNs, Memory, Percent
from vgpu.units import parse_bytes

MOST_PERCENT: Final = 25_600.0
"""256 whole GPUs."""
LARGEST_TOTAL_BYTES: Final = 1 << 58
DEFAULT_WARNING_NS: Final = 600 * 10**9
IdleAction = Literal["remove", "suspend"]


def _total_percent(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value.strip().removesuffix("%"))
    except ValueError:
        raise ValueError(f"{value!r} is no number of percent: write 150, for one and a half GPUs") from None


def _size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


TotalPercent = Annotated[float, BeforeValidator(_total_percent), Field(ge=0, le=MOST_PERCENT)]
TotalBytes = Annotated[int, BeforeValidator(_size), Field(ge=0, le=LARGEST_TOTAL_BYTES)]
_Section: Final = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=building.deferred)


class Quota(BoundedRequest):
    """One section; None: the section does not say.

    ``sm_percent``          the largest share of one vGPU (``sm``)
    ``memory_bytes``        the largest memory of one vGPU (``mem``)
    ``sm_total_percent``    promised share of all vGPUs together, 100 for each GPU (``sm_total``)
    ``memory_total_bytes``  memory of all vGPUs together (``mem_total``)
    ``vgpus``               the number of vGPUs
    ``ttl_ns``              the longest time to live; a vGPU without one gets it (``ttl``)
    ``idle_limit_ns``       a vGPU that is idle for so long is reclaimed (``idle_limit``)
    ``idle_warning_ns``     so long before, the node warns (``idle_warning``)
    ``idle_action``         ``remove`` ends the vGPU with its programs; ``suspend`` frees its GPU memory
    ``default_sm_percent``, ``default_memory_bytes``, ``default_idle_suspend_ns``, ``default_priority``
                            what a new vGPU gets where its request does not say
    ``weight``              the user's part in the queue, beside the parts of others
    """

    model_config = _Section

    sm_percent: Percent | None = Field(None, alias="sm")
    memory_bytes: Memory | None = Field(None, alias="mem")
    sm_total_percent: TotalPercent | None = Field(None, alias="sm_total")
    memory_total_bytes: TotalBytes | None = Field(None, alias="mem_total")
    vgpus: int | None = Field(None, ge=0, le=1 << 20)
    ttl_ns: DurationNs | None = Field(None, alias="ttl")
    idle_limit_ns: IdleNs | None = Field(None, alias="idle_limit")
    idle_warning_ns: DurationNs | None = Field(None, alias="idle_warning")
    idle_action: IdleAction | None = None
    default_sm_percent: Percent | None = Field(None, alias="default_sm")
    default_memory_bytes: Memory | None = Field(None, alias="default_mem")
    default_idle_suspend_ns: IdleNs | None = Field(None, alias="default_idle_suspend")
    default_priority: PriorityName | None = None
    weight: float | None = Field(None, gt=0, le=1000)

    @model_validator(mode="after")
    def _consistent(self) -> Quota:
        for default, most, names in (
            (self.default_sm_percent, self.sm_percent, "default_sm and sm"),
            (self.default_memory_bytes, self.memory_bytes, "default_mem and mem"),
            (self.idle_warning_ns, self.idle_limit_ns, "idle_warning and idle_limit"),
        ):
            if default is not None and most is not None and default > most:
                raise ValueError(f"{names}: the first is more than the second")
        return self

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in QUOTA_FIELDS)


QUOTA_FIELDS: Final = tuple(Quota.model_fields)
_LARGER_IS_STRICTER: Final = frozenset({"idle_warning_ns"})
_NO_ORDER: Final = frozenset({"idle_action", "default_priority"})


class Quotas(Quota):
    """``[quota]`` and its subsections. Keys of ``user`` and ``group``: a name or a number."""

    model_config = _Section

    user: dict[str, Quota] = Field(default_factory=dict)
    group: dict[str, Quota] = Field(default_factory=dict)
    claim: dict[Kind, Quota] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _claims_have_no_idle_limit(self) -> Quotas:
        for kind, quota in self.claim.items():
            wrong = [name for name in QUOTA_FIELDS if _has(quota, name) and name not in OF_ONE_REQUEST]
            if wrong:
                key = Quota.model_fields[wrong[0]].alias or wrong[0]
                raise ValueError(f"claim.{kind} has no {key!r}; there are {', '.join(sorted(_KEYS_OF_CLAIMS))}")
        return self

    @property
    def everyone(self) -> Quota:
        return Quota.model_construct(
            {name for name in QUOTA_FIELDS if _has(self, name)}, **{name: getattr(self, name) for name in QUOTA_FIELDS}
        )

    @property
    def is_trivial(self) -> bool:
        """There is no quota at all."""
        return self.sections == 0

    @property
    def sections(self) -> int:
        """How many sections of the file have a key."""
        subsections = (*self.user.values(), *self.group.values(), *self.claim.values())
        return sum(not quota.is_empty for quota in (self.everyone, *subsections))

    def as_option(self) -> str:
        """The keys of the file that have a value, as JSON."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    @classmethod
    def from_option(cls, text: str) -> Quotas:
        """What ``as_option`` wrote. ``VgpuError`` (invalid) names the key that is wrong."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "--quotas"
            raise VgpuError(ErrorCode.INVALID, f"quota.{where}: {in_plain_words(problem['msg'])}") from None

    def of(self, user: User) -> Allowance:
        """What holds for ``user``, with the section of each value."""
        layers: list[tuple[str, Quota]] = []
        own = self.user.get(user.name) or self.user.get(str(user.uid))
        if own is not None:
            layers.append((f"user {user.name or user.uid}", own))
        if not user.is_exempt:
            found = [(f"group {name}", quota) for name, quota in self.group.items() if name in user.groups]
            layers += [_most_generous(name, found) for name in QUOTA_FIELDS if any(_has(q, name) for _, q in found)]
            layers.append(("everyone", self.everyone))
        values: dict[str, Any] = {}
        sections: dict[str, str] = {}
        for section, quota in layers:
            for name in QUOTA_FIELDS:
                if _has(quota, name) and name not in values:
                    values[name], sections[name] = getattr(quota, name), section
        return Allowance(user, Quota.model_construct(set(values), **values), sections)

    def of_claim(self, kind: str) -> Quota | None:
        return next((quota for name, quota in self.claim.items() if name == kind), None)


NO_QUOTAS: Final = Quotas()
OF_ONE_REQUEST: Final = frozenset(
    {"sm_percent", "memory_bytes", "sm_total_percent", "memory_total_bytes", "vgpus", "ttl_ns"}
)
_KEYS_OF_CLAIMS: Final = frozenset(Quota.model_fields[name].alias or name for name in OF_ONE_REQUEST)


@dataclass(frozen=True, slots=True)
class User:
    """``name`` and ``groups`` as the name service has them ("": none). ``is_exempt``: root, or the node's own user."""

    uid: int
    name: str = ""
    groups: frozenset[str] = frozenset()
    is_exempt: bool = False

    @property
    def shown(self) -> str:
        return self.name or f"uid {self.uid}"


@dataclass(frozen=True, slots=True)
class Allowance:
    """The quota that holds for a user. ``sections``: by field, the section that has its value."""

    user: User
    quota: Quota
    sections: Mapping[str, str] = field(default_factory=dict)

    @property
    def warning_ns(self) -> int:
        """How long before the reclaim the node warns: a tenth of the limit, at most ten minutes, unless it is set."""
        limit = self.quota.idle_limit_ns or 0
        set_ns = self.quota.idle_warning_ns
        return min(limit, set_ns) if set_ns is not None else min(limit // 10, DEFAULT_WARNING_NS)


def _has(quota: Quota, name: str) -> bool:
    return getattr(quota, name) is not None


def _most_generous(name: str, found: Iterable[tuple[str, Quota]]) -> tuple[str, Quota]:
    """Of the groups' sections that have the key, the one with the largest value, as a section of that key alone. An
    idle limit of 0 is none."""
    having = [(section, getattr(quota, name)) for section, quota in found if _has(quota, name)]
    if name not in _NO_ORDER:
        sign = -1 if name in _LARGER_IS_STRICTER else 1
        unlimited = name == "idle_limit_ns"
        having.sort(key=lambda one: (unlimited and one[1] == 0, sign * one[1]), reverse=True)
    section, value = having[0]
    return section, Quota.model_construct({name}, **{name: value})
