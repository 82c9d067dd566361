"""The configuration file: what is read, what is refused and at which line, what goes before what."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.config import Config, Problem, find, known_keys, line_of, load, parse
from vgpu.ctl.main import run
from vgpu.data_files import shipped
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.starting import configured_command

WHOLE = """
[serve]
gpus = [0, 1]
mode = "auto"
period = "40ms"
window = "12ms"
host_memory = "64G"

[gpu.1]
mode = "spatial"
window = "2ms"

[dashboard]
listen = "127.0.0.1:7080"
containers = "unix:///run/docker.sock"
[image.train]
image = "example/train:1"
command = ["python", "train.py"]
sm = "30%"
mem = "8G"
mode = "spatial"
network = "none"
[metrics]
listen = "[::1]:0"
"""


def parsed(text: str) -> Config:
    found = parse(text)
    assert isinstance(found, Config), found
    return found


def problems(text: str) -> list[Problem]:
    found = parse(text)
    assert isinstance(found, list)
    return found


def test_every_key_is_read_in_plain_units() -> None:
    config = parsed(WHOLE)
    assert config.serve.gpus == (0, 1)
    assert (config.serve.period_ns, config.serve.window_ns) == (40_000_000, 12_000_000)
    assert config.serve.host_memory_bytes == 64 << 30
    assert config.gpu[1].mode == "spatial"
    assert config.dashboard.listen == "127.0.0.1:7080"
    assert config.dashboard.containers == "unix:///run/docker.sock"
    train = config.image["train"]
    assert (train.sm_percent, train.memory_bytes, train.command) == (30.0, 8 << 30, ("python", "train.py"))
    assert train.spec("first").name == "first"


def test_the_example_speaks_of_every_key_and_says_what_holds_anyway() -> None:
    text = shipped("config.toml").read_text()
    assert parsed(text) == Config()
    spoken = parsed(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.M))
    for model in (spoken.serve, spoken.gpu[1], spoken.dashboard, spoken.image["train"], spoken.metrics, spoken.limits):
        assert model.model_fields_set == set(type(model).model_fields)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[serve]\n\nperiods = '40ms'", 3, "[serve] has no 'periods'; did you mean 'period'?"),
        ("[server]\nmode = 'auto'", 1, "the file has no 'server'; did you mean 'serve'?"),
        ("[gpu.0]\nxyz = 1", 2, "[gpu.0] has no 'xyz'; there are mode, period, window"),
        ("gpu.0.modes = 'auto'", 1, "[gpu.0] has no 'modes'; did you mean 'mode'?"),
        ("[serve]\nmode = 'spacial'", 2, "serve.mode: should be 'auto', 'spatial' or 'temporal'"),
        ("[serve]\nperiod = '2h'", 2, "serve.period: 2h is not between 5ms and 1s"),
        ("[serve]\nhost_memory = '8Q'", 2, "serve.host_memory: '8Q' is not a size: write 8G, 8GiB, 512M or a number"),
        ("[serve]\ngpus = [0,\n -1]", 2, "serve.gpus.1: should be at least 0"),
        ("[gpu.one]\nmode = 'auto'", 1, "gpu.one: should be a whole number"),
        ("[serve]\nperiod = 5", 2, "serve.period: '5' is not a duration: write 10ms, 90s, 8h or 1h30m"),
        ("[gpu.1]\nwindow = true", 2, "gpu.1.window: 'True' is not a duration: write 10ms, 90s, 8h or 1h30m"),
        ("[serve]\nsimulate = 'x'", 2, "serve.simulate: should be a whole number"),
        ("[serve]\ngpus = 3", 2, "serve.gpus: should be a list"),
        ("[dashboard]\nlisten = 5", 2, "dashboard.listen: should be a text"),
        ("[metrics]\nlisten = '::1:9835'", 2, "metrics.listen: '::1:9835' is not an address"),
        ("[dashboard]\ncontainers = 'tcp://h:1'", 2, "dashboard.containers: 'tcp://h:1' is no socket of an engine"),
        ("[image.a]\nimage = 'x'", 1, "image.a.sm: is missing"),
        ("[image.a]\nsm = 30\nimage = '-v /:/host'", 3, "image.a.image: '-v /:/host' is not the name of an image"),
        (
            "[image.a]\nsm = 30\nimage = 'x'\nvolumes = []",
            4,
            "[image.a] has no 'volumes'; there are image, command, sm",
        ),
        ("[image.'a b']\nsm = 30\nimage = 'x'", 1, "image.a b: 'a b' is not a name"),
        ("[serve]\nmode = ", 2, "this is not TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, message: str) -> None:
    [problem] = problems(text)
    assert problem.line == line
    assert problem.message.startswith(message)


def test_all_problems_are_told_in_the_order_of_the_file() -> None:
    assert [p.line for p in problems("[dashboard]\nlisten = 'x'\n[serve]\nmod = 1\nsimulate = 99")] == [2, 4, 5]


KEYS = st.text("abcdefgh-_", min_size=1, max_size=6)


@given(
    tables=st.dictionaries(KEYS, st.dictionaries(KEYS, st.integers(0, 9), min_size=1, max_size=4), max_size=4),
    blank=st.integers(0, 2),
)
def test_the_line_of_a_key_is_where_it_stands(tables: dict[str, dict[str, int]], blank: int) -> None:
    lines, expected = [], {}
    for table, values in tables.items():
        lines += [""] * blank + [f"[{table}]"]
        for key, value in values.items():
            lines.append(f"{key} = {value}")
            expected[table, key] = len(lines)
    text = "\n".join(lines)
    assert {keys: line_of(text, keys) for keys in expected} == expected


def test_a_long_line_costs_no_time() -> None:
    assert line_of("a" * 100_000, ("a",)) == 0


def test_where_the_file_is() -> None:
    home = {"HOME": "/home/ann"}
    assert find(home, uid=1000) == Path("/home/ann/.config/vgpu/config.toml")
    assert find(home | {"XDG_CONFIG_HOME": "/c"}, uid=1000) == Path("/c/vgpu/config.toml")
    assert find(home, uid=0) == Path("/etc/vgpu/config.toml")
    assert find(home | {"VGPU_CONFIG": "/x.toml"}, uid=0) == Path("/x.toml")


def test_only_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    assert load(environment={"XDG_CONFIG_HOME": str(tmp_path)}).path is None or Path("/etc/vgpu/config.toml").exists()
    with pytest.raises(VgpuError, match="there is no configuration file") as refused:
        load(environment={"VGPU_CONFIG": str(tmp_path / "none.toml")})
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_the_command_line_goes_before_the_file_for_every_gpu() -> None:
    config = parsed(WHOLE).with_options(mode="temporal", window="1ms", gpus=None, simulate=None)
    assert (config.serve.mode, config.serve.window_ns, config.serve.period_ns) == ("temporal", 1_000_000, 40_000_000)
    assert (config.gpu[1].mode, config.gpu[1].window_ns) == (None, None)


def test_simulated_gpus_of_the_command_line_are_none_of_the_files() -> None:
    config = parsed(WHOLE).with_options(simulate=1)
    assert (config.serve.gpus, config.gpu, config.serve.mode) == (None, {}, "auto")


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(VgpuError, match=r"^--host-memory: '8Q' is not a size"):
        Config().with_options(host_memory="8Q")


def test_the_node_is_told_what_the_file_says() -> None:
    command = configured_command(parsed(WHOLE))
    told = dict(zip(command[4::2], command[5::2], strict=False))
    assert told["--mode"] == "auto"
    assert told["--period"] == "40000000"
    assert [command[i + 1] for i, word in enumerate(command) if word == "--gpu"] == ["0", "1"]
    others = json.loads(command[command.index("--others") + 1])
    assert others == {"1": {"mode": "spatial", "period_ns": 40_000_000, "window_ns": 2_000_000}}


def test_config_says_what_is_in_force_and_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(WHOLE)
    monkeypatch.setenv("VGPU_CONFIG", str(file))
    assert run(["config", "-o", "json"]) == 0
    told = {row["key"]: (row["value"], row["source"]) for row in json.loads(capsys.readouterr().out)["settings"]}
    assert told["serve.period"] == (40_000_000, f"{file}:5")
    assert told["gpu.1.period"] == (40_000_000, "serve.period")
    assert told["serve.simulate"] == (0, "default")
    assert run(["config"]) == 0
    assert re.search(rf"^serve.host_memory +64 GiB +{file}:7$", capsys.readouterr().out, re.M)


def test_check_names_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[serve]\nmodes = 1\n[x]\n")
    assert run(["config", "check", str(file)]) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == [f"{file}:2", f"{file}:3"]
    file.write_text(WHOLE)
    assert run(["config", "check", str(file)]) == 0
    assert run(["config", "check", str(tmp_path / "none")]) == 2


def test_serve_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[serve]\nmod = 'auto'")
    monkeypatch.setenv("VGPU_CONFIG", str(file))
    assert run(["serve"]) == 2
    assert "[serve] has no 'mod'; did you mean 'mode'?" in capsys.readouterr().err


def test_known_keys_are_those_of_the_models() -> None:
    assert known_keys() == ["serve", "gpu", "metrics", "dashboard", "image", "limits", "quota", "queue"]
    assert known_keys("gpu", "0") == ["mode", "period", "window"]
    assert known_keys("metrics") == ["listen"]
