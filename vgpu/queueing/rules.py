"""The section ``[queue]`` of the configuration."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from vgpu.bounds import BoundedRequest
from vgpu.errors import ErrorCode, VgpuError, in_plain_words
from vgpu.protocol import building
from vgpu.spec import DurationNs


class QueueRules(BoundedRequest):
    """``patience_ns``: after this time a user's first request goes before all others, and a GPU is kept for it
    (``patience``). ``most``, ``most_per_user``: requests that may wait; root's and the node's own user's count only in
    ``most``. A request that waits has a link, and a user has 64 (``limits.links_per_user``): with all that may wait, a
    user still has links for ``ls`` and ``rm``. ``preempt`` "suspend": once a request has waited for ``preempt_after``,
    the node suspends vGPUs of lower priority for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=building.deferred)

    patience_ns: DurationNs = Field(600 * 10**9, alias="patience")
    most: int = Field(1000, ge=1, le=100_000)
    most_per_user: int = Field(48, ge=1, le=100_000)
    preempt: Literal["off", "suspend"] = "off"
    preempt_after_ns: DurationNs = Field(60 * 10**9, alias="preempt_after")

    def as_option(self) -> str:
        """The fields that differ from the defaults, as JSON."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    @classmethod
    def from_option(cls, text: str) -> QueueRules:
        """What ``as_option`` wrote. ``VgpuError`` (invalid) names the key that is wrong."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem: Any = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "--queue"
            raise VgpuError(ErrorCode.INVALID, f"queue.{where}: {in_plain_words(problem['msg'])}") from None


DEFAULT_RULES: Final = QueueRules()
