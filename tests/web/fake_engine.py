"""A container engine that runs nothing: what the dashboard uses of the Docker-compatible API, at a Unix socket."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


class FakeEngine:
    """``containers``: by id, as the engine lists them. ``bodies``: of creations. ``asked``: METHOD PATH of each change.
    ``refuses``: by the path of a change, (status, words). ``images``: all that it has."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine.sock"
        self.address = f"unix://{self.path}"
        self.podman = False
        self.containers: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, bytes] = {}
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.refuses: dict[str, tuple[int, str]] = {}
        self.images = {"example/train:1", "example/serve:1"}
        self.more_log = threading.Event()

    def add(self, name: str, *, state: str = "running", **labels: str) -> str:
        container_id = f"{len(self.bodies) + len(self.containers) + 1:064x}"
        self.containers[container_id] = {
            "Id": container_id,
            "Names": [f"/{name}"],
            "Image": "example/train:1",
            "Command": "python train.py",
            "Labels": {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()},
            "State": state,
            "Status": "Up 3 seconds" if state == "running" else "Created",
            "Created": 1_790_000_000,
        }
        return container_id

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if method != "GET":
            self.asked.append(f"{method} {path}")
            for pattern, refusal in self.refuses.items():
                if re.fullmatch(pattern, path):
                    return refusal[0], {"message": refusal[1]}
        if path == "/version":
            return 200, {"Components": [{"Name": "Podman Engine" if self.podman else "Engine"}]}
        if match := re.fullmatch(r"(?:/v4\.0\.0/libpod)?/images/(.+)/(?:json|exists)", path):
            return (200, {}) if match[1] in self.images else (404, {"message": f"No such image: {match[1]}"})
        if path == "/containers/json":
            wanted = json.loads(query.get("filters", ["{}"])[0]).get("label", [])
            return 200, [one for one in self.containers.values() if _has(one, wanted)]
        if path == "/containers/create" or path.endswith("/libpod/containers/create"):
            self.bodies.append(body)
            container_id = self.add(query["name"][0], state="created")
            self.containers[container_id]["Labels"] = body.get("Labels") or body["labels"]
            return 201, {"Id": container_id}
        _, _, container_id, *verb = path.split("/")
        if container_id not in self.containers:
            return 404, {"message": f"no such container: {container_id}"}
        if verb == ["json"]:
            return 200, {"Id": container_id, "Config": {"Tty": False}}
        if method == "DELETE":
            del self.containers[container_id]
        else:
            self.containers[container_id]["State"] = {"start": "running", "stop": "exited"}[verb[0]]
        return 204, None


def _has(container: dict[str, Any], labels: list[str]) -> bool:
    return all(container["Labels"].get(label.partition("=")[0]) == label.partition("=")[2] for label in labels)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def listening(engine: FakeEngine) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if match := re.fullmatch(r"/containers/(\w+)/logs", urlsplit(self.path).path):
                self.send_log(engine.logs.get(match[1], b""), follow="follow=true" in self.path)
                return
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = engine.answer(self.command, self.path, json.loads(body or b"{}"))
            data = b"" if said is None else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")  # so that tests can make it go away
            with suppress(BrokenPipeError):  # its client has gone
                self.end_headers()
                self.wfile.write(data)

        do_DELETE = do_POST

        def send_log(self, data: bytes, *, follow: bool) -> None:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
            if follow:
                engine.more_log.wait(60)
                self.wfile.write(frame(1, b"and on\n"))

    with _Server(str(engine.path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            engine.path.unlink()
