"""Who gets in: the rules alone, and the layer that keeps them in front of an application."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from starlette.responses import PlainTextResponse

from vgpu.errors import VgpuError
from vgpu.http.listening import Address, bind, parse_address
from vgpu.web.guard import MOST_BODY_BYTES, Asked, Guard, Rules, refusal
from vgpu.web.server import token_from

TOKEN = "a-token-of-some-length"
LOCAL = Rules(TOKEN, local=True, port=7080)
OPEN = Rules(None, local=True, port=7080)
ABROAD = Rules(TOKEN, local=False, port=7080)


def asked(method: str = "GET", path: str = "/api/v1/vgpus", host: str = "localhost:7080", **more: str) -> Asked:
    return Asked(method=method, path=path, host=host, **more)


def status(rules: Rules, request: Asked) -> int:
    refused = refusal(rules, request)
    return 200 if refused is None else refused.status


def test_the_token_opens_as_a_header_and_as_what_it_was_exchanged_for() -> None:
    assert status(LOCAL, asked()) == 401
    assert status(LOCAL, asked(authorization=f"Bearer {TOKEN}")) == 200
    assert status(LOCAL, asked(cookie=LOCAL.cookie)) == 200
    for wrong in ("", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {LOCAL.cookie}", "Bearer é"):
        assert status(LOCAL, asked(authorization=wrong)) == 401
    assert status(LOCAL, asked(cookie=TOKEN)) == 401
    assert status(OPEN, asked()) == 200
    assert status(OPEN, asked(cookie="anything")) == 200


@pytest.mark.parametrize("path", ["/static/main.js", "/login", "/healthz"])
def test_what_says_nothing_of_the_node_needs_no_token(path: str) -> None:
    assert status(LOCAL, asked(path=path)) == 200


@pytest.mark.parametrize("path", ["/", "/api/docs", "/metrics", "/static", "/healthz/x"])
def test_all_else_does(path: str) -> None:
    assert status(LOCAL, asked(path=path)) == 401


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:7080", "[::1]:7080"])
def test_names_of_this_machine_are_good_at_any_port(host: str) -> None:
    assert status(OPEN, asked(host=host)) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:7080", "localhost.evil.example", "127.0.0.1.x", "[", "10.0.0.1"]
)
def test_a_foreign_name_that_points_here_is_refused(host: str) -> None:
    assert status(OPEN, asked(host=host)) == 421
    assert status(ABROAD, asked(host=host, authorization=f"Bearer {TOKEN}")) == 200


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE", "PUT"])
def test_changes_are_asked_for_by_the_page_itself_or_by_no_page(method: str) -> None:
    assert status(OPEN, asked(method)) == 200  # curl
    assert status(OPEN, asked(method, origin="http://localhost:7080", fetch_site="same-origin")) == 200
    for origin in ("http://evil.example", "http://localhost:9999", "null", "http://localhost"):
        assert status(OPEN, asked(method, origin=origin)) == 403
        assert status(LOCAL, asked(method, origin=origin, cookie=LOCAL.cookie)) == 403
    assert status(OPEN, asked(method, fetch_site="cross-site")) == 403
    assert status(OPEN, asked(method, fetch_site="same-site")) == 403  # another port of this host


def test_bodies_are_bounded() -> None:
    assert status(OPEN, asked("POST", length=str(MOST_BODY_BYTES))) == 200
    assert status(OPEN, asked("POST", length=str(MOST_BODY_BYTES + 1))) == 413
    assert status(OPEN, asked("POST", transfer="chunked")) == 413


def through(rules: Rules, method: str, path: str, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=Guard(PlainTextResponse("inside"), rules))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7080") as client:
            return await client.request(method, path, **options)

    return trio.run(ask)


def test_an_address_with_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read() -> None:
    answer = through(LOCAL, "GET", f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert TOKEN not in answer.headers["set-cookie"]
    for part in ("vgpu-7080=", "HttpOnly", "SameSite=strict"):
        assert part in answer.headers["set-cookie"]
    inside = through(LOCAL, "GET", "/", headers={"cookie": f"other=1; vgpu-7080={LOCAL.cookie}"})
    assert inside.text == "inside"
    # Another dashboard's, at another port of the same host.
    assert through(LOCAL, "GET", "/", headers={"cookie": f"vgpu-7081={LOCAL.cookie}"}).status_code == 401


def test_a_wrong_token_leads_to_the_page_that_asks_for_it() -> None:
    answer = through(LOCAL, "GET", "/?token=wrong", headers={"accept": "text/html"})
    assert answer.status_code == 401
    assert "<form" in answer.text
    assert "set-cookie" not in answer.headers
    assert through(LOCAL, "POST", "/login", data={"token": "wrong"}).status_code == 401
    assert through(LOCAL, "POST", "/login", data={"token": TOKEN}).status_code == 303
    assert (
        through(LOCAL, "POST", "/login", data={"token": TOKEN}, headers={"origin": "http://evil.example"}).status_code
        == 403
    )


def test_a_token_in_the_address_opens_nothing_of_the_api() -> None:
    assert through(LOCAL, "GET", f"/api/v1/vgpus?token={TOKEN}").status_code == 401
    assert Guard(PlainTextResponse(""), LOCAL)._exchanged("//evil.example/").headers["location"] == "/evil.example/"


def test_every_answer_keeps_the_page_to_its_own_host() -> None:
    for path in ("/", "/static/x", "/login"):
        policy = through(LOCAL, "GET", path).headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7080", Address("127.0.0.1", 7080, local=True)),
        ("7081", Address("127.0.0.1", 7081, local=True)),
        (":0", Address("127.0.0.1", 0, local=True)),
        ("[::1]:80", Address("::1", 80, local=True)),
        ("localhost:80", Address("localhost", 80, local=True)),
        ("0.0.0.0:80", Address("0.0.0.0", 80, local=False)),
        ("gpu7.example:80", Address("gpu7.example", 80, local=False)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text, "127.0.0.1:7080") == address


@pytest.mark.parametrize(
    "text", ["", "localhost", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:65536", "²:²", "::1:80", "[h:80", "h:-1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(VgpuError, match="is not an address"):
        parse_address(text, "127.0.0.1:7080")


def test_a_taken_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(VgpuError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            bind(parse_address(str(port), "127.0.0.1:7080"))


def test_a_token_file_is_made_and_kept_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = token_from(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_from(path) == made
    assert len({token_from(None), token_from(None), made}) == 3
    path.chmod(0o640)
    with pytest.raises(VgpuError, match="can be read by others"):
        token_from(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(VgpuError, match="at least 16"):
        token_from(path)
    with pytest.raises(VgpuError, match="cannot make"):
        token_from(tmp_path / "nowhere" / "token")
