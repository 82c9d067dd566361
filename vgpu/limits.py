"""What one user can take of a node: every bound, in one place.

``Limits`` is the section ``[limits]`` of the configuration file. The node reads the file and passes the limits to its
GPU Servers, and those pass them to their brokers: ``as_option`` writes what ``from_option`` reads.

Each field has a unit, a default and a reason. A bound *per user* does not hold for root, nor for the uid of the node
(``is_exempt``). A bound *in all* holds for every user, and keeps a part for these two.

A new bound gets a field here; docs/explanation/security.md lists the fields, and a test holds that list
against this file.
"""

from __future__ import annotations

import os
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vgpu.errors import ErrorCode, VgpuError, in_plain_words


def _bound(default: int, unit: str, reason: str, *, least: int, most: int) -> Any:
    return Field(default, ge=least, le=most, description=reason, json_schema_extra={"unit": unit})


class Limits(BaseModel):
    """Whole numbers. The description of a field is the reason for its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vgpus_per_user: int = _bound(
        64,
        "vGPUs of one user on one GPU",
        "A GPU has 256 keys; four users that take all that they may fill them.",
        least=1,
        most=256,
    )
    vgpus_kept: int = _bound(
        16, "vGPUs of one GPU", "These keys of the 256 are kept for root and the node's own uid.", least=0, most=255
    )
    processes_per_vgpu: int = _bound(64, "processes of one vGPU", "The activity page has 64 slots.", least=1, most=64)
    mps_places_kept_percent: int = _bound(
        50,
        "percent of the processes that an MPS server takes",
        "These places are kept for the vGPUs of the GPU, each its share and one at least. The others are free to all.",
        least=0,
        most=100,
    )
    links: int = _bound(
        1024, "links to one socket of the node or a GPU Server", "Each link takes a descriptor.", least=64, most=65536
    )
    links_per_user: int = _bound(
        64,
        "links to the node of one user, with the user's subordinate uids",
        "A user's programs that watch or ask at the same time are few.",
        least=1,
        most=65536,
    )
    links_kept: int = _bound(
        64, "links to the node", "These links are kept for root and the node's own uid.", least=1, most=65535
    )
    visitors_per_broker: int = _bound(
        128, "links to one broker", "A process has a link to its broker for one message.", least=8, most=1024
    )
    first_message_bytes: int = _bound(
        4096, "bytes", "The first message of a link has a dozen short fields.", least=256, most=65536
    )
    complaints_per_message: int = _bound(
        3, "complaints about one message", "Three complaints show what is wrong with a message.", least=1, most=100
    )
    complaint_letters: int = _bound(
        200, "letters of one complaint", "A complaint quotes what the peer sent.", least=40, most=10_000
    )
    events_kept: int = _bound(
        10_000, "events of one node", "A month of the events that people cause.", least=100, most=1_000_000
    )
    events_kept_per_user: int = _bound(
        2_000,
        "events of one user's vGPUs",
        "One user may not push out the history of others.",
        least=10,
        most=1_000_000,
    )
    peer_events_kept: int = _bound(
        5_000,
        "events that programs and links cause",
        "What programs cause has a ring of its own, so that it pushes out nothing that people did.",
        least=10,
        most=1_000_000,
    )
    peer_event_pause_ms: int = _bound(
        1_000,
        "milliseconds between two events of one vGPU that its peers cause",
        "Those between are counted, and the next event has their number.",
        least=10,
        most=3_600_000,
    )
    recordings: int = _bound(4, "recordings of one GPU at once", "Each keeps up to 50,000 records.", least=2, most=64)
    recordings_per_user: int = _bound(
        1, "recordings of one user on one GPU at once", "One user may not hold all of them.", least=1, most=64
    )
    recordings_kept: int = _bound(
        1, "recordings of one GPU", "This part is kept for root and the node's own uid.", least=1, most=63
    )
    http_links: int = _bound(
        256, "connections to the dashboard or the exporter", "Each takes a descriptor.", least=32, most=16384
    )
    http_links_per_source: int = _bound(
        32,
        "connections to the dashboard or the exporter from one address, or of one local user",
        "A browser opens six to a server, a scraper one.",
        least=6,
        most=16384,
    )
    http_links_kept: int = _bound(
        16,
        "connections to the dashboard or the exporter",
        "These connections are kept for root and the server's own uid.",
        least=1,
        most=8192,
    )
    descriptors_kept: int = _bound(
        64,
        "descriptors of one process of the node",
        "The event loop, the journal and the logs work on when links and vGPUs have taken all others.",
        least=64,
        most=4096,
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Limits:
        for part, whole in (
            ("links_kept", "links"),
            ("recordings_kept", "recordings"),
            ("http_links_kept", "http_links"),
        ):
            if getattr(self, part) >= getattr(self, whole):
                raise ValueError(f"{part} has to be less than {whole}, which is {getattr(self, whole)}")
        return self

    def as_option(self) -> str:
        """The fields that differ from the defaults, as JSON."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_option(cls, text: str) -> Limits:
        """What ``as_option`` wrote. ``VgpuError`` (invalid) names the field that is wrong."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "--limits"
            raise VgpuError(ErrorCode.INVALID, f"{where}: {in_plain_words(problem['msg'])}") from None


DEFAULT_LIMITS: Final = Limits()


def is_exempt(uid: int) -> bool:
    """Root and the uid of the node have no bound per user, and the kept part is for them."""
    return uid in {0, os.geteuid()}
