"""``vgpu.limits``: each bound is described once, documented, configurable, and reaches the processes that keep it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode
from tests.integration.process import attach_request, knock
from vgpu.config import Config, parse
from vgpu.errors import VgpuError
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.node.starting import configured_command

ROOT = Path(__file__).parents[2]


def test_each_bound_stands_in_the_documents_with_unit_default_and_reason() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text().partition("## Limits")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    described = [
        (name, str(field.default), field.json_schema_extra["unit"], field.description)  # type: ignore[index, call-overload]
        for name, field in Limits.model_fields.items()
    ]
    assert rows == described


def test_the_configuration_file_sets_them() -> None:
    config = parse("[limits]\nvgpus_per_user = 3")
    assert isinstance(config, Config)
    command = configured_command(config)
    assert json.loads(command[command.index("--limits") + 1]) == {"vgpus_per_user": 3}
    assert "--limits" not in configured_command(Config())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[limits]\nvgpus_per_usr = 3", 2, "[limits] has no 'vgpus_per_usr'; did you mean 'vgpus_per_user'?"),
        ("[limits]\nvgpus_per_user = 0", 2, "limits.vgpus_per_user: should be at least 1"),
        ("[limits]\nvgpus_per_user = 1000", 2, "limits.vgpus_per_user: should be at most 256"),
        ("[limits]\nlinks_kept = 2000", 1, "limits: links_kept has to be less than links, which is 1024"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    problems = parse(text)
    assert isinstance(problems, list)
    assert [(problem.line, problem.message) for problem in problems] == [(line, message)]


def test_an_option_gives_the_limits_that_wrote_it() -> None:
    limits = Limits(vgpus_per_user=3, links=100, links_kept=7)
    assert Limits.from_option(limits.as_option()) == limits
    assert Limits.from_option("{}") == DEFAULT_LIMITS
    with pytest.raises(VgpuError, match="links_kept"):
        Limits.from_option('{"links_kept": "many"}')


def test_a_node_passes_them_to_its_gpu_servers_and_those_to_their_brokers() -> None:
    """A broker is forked, and its command line does not show them; it keeps them."""
    with SimulatedNode(1, "temporal", "--limits", '{"vgpus_per_user": 7, "processes_per_vgpu": 1}') as node:
        server = Path(f"/proc/{node.server_pid()}/cmdline").read_text().split("\0")
        assert '{"vgpus_per_user":7,"processes_per_vgpu":1}' in server
        vgpu = node.create(sm_percent=10)
        node.attach(vgpu.vgpu_id, use=False)
        reply, _ = knock(node.paths.broker_socket(vgpu.vgpu_id), attach_request())
        assert (reply["ok"], reply["error"]) == (
            False,
            f"{vgpu.vgpu_id} has 1 process already, its most; end one, or create another vGPU",
        )
