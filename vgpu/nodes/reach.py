"""One node of several: over the HTTP API of its dashboard, or by ``vgpuctl`` there, over SSH."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import ValidationError

from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.nodes.file import NodeEntry
from vgpu.protocol.messages import Snapshot, VgpuStatus
from vgpu.protocol.usage import UsageReport
from vgpu.spec import VgpuSpec

Model = TypeVar("Model", Snapshot, VgpuStatus, UsageReport)
ANSWER_S: Final = 60.0
MOST_BYTES: Final = 64 << 20
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_NO_CONNECTION: Final = 255
"""The exit code of ssh itself."""
_CODES: Final = {
    2: ErrorCode.INVALID,
    3: ErrorCode.NOT_FOUND,
    4: ErrorCode.NO_ROOM,
    5: ErrorCode.UNREACHABLE,
}
"""What the exit codes of ``vgpuctl`` mean."""


class Reached(Protocol):
    """Any thread may call. Methods raise ``VgpuError``."""

    def snapshot(self) -> Snapshot: ...

    def create(self, spec: VgpuSpec, gpu: int, words: Sequence[str]) -> VgpuStatus:
        """``words``: the options that describe ``spec``."""

    def usage(self, since_unix_s: float, until_unix_s: float, by: str) -> UsageReport:
        """As ``vgpuctl usage`` there."""

    def run(self, words: Sequence[str], *, terminal: bool) -> int:
        """``vgpuctl WORDS`` there, with this process's input and output; the exit code."""


def reached(entry: NodeEntry) -> Reached:
    return OverSsh(entry.ssh) if entry.ssh is not None else OverHttp(entry.url, entry.token_file)


class OverHttp:
    def __init__(self, url: str, token_file: Path | None) -> None:
        self._url, self._token_file = url, token_file

    def snapshot(self) -> Snapshot:
        return _read(Snapshot, self._ask("GET", "snapshot"))

    def create(self, spec: VgpuSpec, gpu: int, words: Sequence[str]) -> VgpuStatus:
        return _read(VgpuStatus, self._ask("POST", f"vgpus?gpu={gpu}", spec.model_dump_json(exclude_none=True)))

    def usage(self, since_unix_s: float, until_unix_s: float, by: str) -> UsageReport:
        asked = urlencode({"since_unix_s": since_unix_s, "until_unix_s": until_unix_s, "by": by})
        return _read(UsageReport, self._ask("GET", f"usage?{asked}"))

    def run(self, words: Sequence[str], *, terminal: bool) -> int:
        """A few commands, each with one vGPU and no option. They print the vGPU as JSON."""
        if len(words) == 2 and not words[1].startswith("-"):
            place = f"vgpus/{quote(words[1], safe='')}"
            method, path = {
                "inspect": ("GET", place),
                "rm": ("DELETE", place),
                "suspend": ("POST", f"{place}/suspend"),
                "resume": ("POST", f"{place}/resume"),
            }.get(words[0], ("", ""))
            if method:
                answer = self._ask(method, path)
                if words[0] == "inspect":
                    print(json.dumps(json.loads(answer), indent=2))
                return 0
        text = f"{shlex.join(words)} is not possible over HTTP"
        raise VgpuError(
            ErrorCode.INVALID, text, "inspect, rm, suspend and resume with NODE/VGPU are; give the node ssh"
        )

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        """No redirection is followed: the token is for this address alone."""
        parts = urlsplit(self._url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
            try:
                connection.request(method, f"{parts.path.rstrip('/')}/api/v1/{path}", body, headers)
                response = connection.getresponse()
                answer = response.read(MOST_BYTES)
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            raise VgpuError(ErrorCode.UNREACHABLE, f"{self._url} does not answer: {error}") from error
        if response.status // 100 != 2:
            raise _refused(response.status, answer, self._url)
        return answer

    def _token(self) -> str:
        assert self._token_file is not None
        try:
            token = self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise VgpuError(ErrorCode.INVALID, f"token_file: cannot read {self._token_file}: {error}") from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            text = f"token_file: {self._token_file} does not hold one word of ASCII letters"
            raise VgpuError(ErrorCode.INVALID, text, "copy it from the --token-file of that node's dashboard")
        return token


def _refused(status: int, answer: bytes, url: str) -> VgpuError:
    try:
        said = json.loads(answer)
        return VgpuError(ErrorCode(said["code"]), cleaned(said["error"], 1000), cleaned(said.get("hint", "")))
    except (ValueError, KeyError, TypeError):
        return VgpuError(ErrorCode.PROTOCOL, f"{url} answers {status}", "is it the address of a dashboard?")


class OverSsh:
    def __init__(self, host: str) -> None:
        self._host = host

    def snapshot(self) -> Snapshot:
        return _read(Snapshot, self._ask(["top", "--once", "-o", "json"]))

    def create(self, spec: VgpuSpec, gpu: int, words: Sequence[str]) -> VgpuStatus:
        return _read(VgpuStatus, self._ask(["create", *words, "--gpu", str(gpu), "-o", "json"]))

    def usage(self, since_unix_s: float, until_unix_s: float, by: str) -> UsageReport:
        times = ["--since", _clock(since_unix_s), "--until", _clock(until_unix_s)]
        return _read(UsageReport, self._ask(["usage", *times, "--by", by, "-o", "json"]))

    def run(self, words: Sequence[str], *, terminal: bool) -> int:
        force = ["-t"] if terminal else []
        try:
            return subprocess.call(["ssh", *force, self._host, shlex.join(["vgpuctl", *words])])
        except OSError as error:
            raise _no_ssh(error) from error

    def _ask(self, words: Sequence[str]) -> str:
        command = [*_SSH, self._host, shlex.join(["vgpuctl", *words])]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ANSWER_S
            )
        except subprocess.TimeoutExpired as error:
            raise VgpuError(ErrorCode.TIMEOUT, f"{self._host} did not answer within {ANSWER_S:g} s") from error
        except OSError as error:
            raise _no_ssh(error) from error
        if done.returncode == 0:
            return done.stdout
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if done.returncode == _NO_CONNECTION:
            last = cleaned(lines[-1]) if lines else "it ended without a word"
            raise VgpuError(ErrorCode.UNREACHABLE, f"ssh {self._host}: {last}", f"ssh {self._host} vgpuctl status")
        said = next((line.partition("vgpuctl: ")[2] for line in lines if "vgpuctl: " in line), "")
        reason = cleaned(said or (lines[-1] if lines else f"exit code {done.returncode}"), 1000)
        hint = next((line.partition("→ ")[2] for line in lines if "→ " in line), "")
        raise VgpuError(_CODES.get(done.returncode, ErrorCode.INTERNAL), reason, cleaned(hint))


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="seconds")


def _no_ssh(error: OSError) -> VgpuError:
    return VgpuError(ErrorCode.MISSING, f"ssh cannot be started: {error}", "apt-get install openssh-client")


def _read(model: type[Model], answer: str | bytes) -> Model:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "it"
        text = f"the node's answer is not understood: {where}: {problem['msg']}"
        raise VgpuError(ErrorCode.VERSION, text, "vgpuctl version on both machines") from None
