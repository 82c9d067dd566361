"""The access rules of the dashboard, which are pure, and the ASGI layer that enforces them in front of everything.

A client that gets in acts as the user of the dashboard's process. So there is a token, as with Jupyter. The dashboard
exchanges an address with ``?token=`` for a cookie that scripts cannot read and other sites cannot send. Programs send
``Authorization: Bearer``. Two headers keep out a page of another site that a browser has open: ``Host`` (a foreign name
that was made to point at this machine) and ``Origin`` (a request that the page makes the browser send).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vgpu.errors import ErrorCode
from vgpu.web.files import STATIC

LOGIN_PATH: Final = "/login"
OPEN_PATHS: Final = (LOGIN_PATH, "/healthz")
OPEN_FOLDER: Final = "/static/"
"""Code and colours, the same for every user."""
MOST_BODY_BYTES: Final = 64 << 10
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """``token`` None: every client that can connect gets in. ``local``: only programs of this machine can connect, so a
    page has no reason to know it by another name. ``port``: the ports of a host share its cookies, so the cookie's name
    contains the port."""

    token: str | None
    local: bool
    port: int

    @property
    def cookie_name(self) -> str:
        return f"vgpu-{self.port}"

    @property
    def cookie(self) -> str:
        """The cookie that a browser keeps. It proves that the browser had the token, and is not the token."""
        assert self.token is not None
        return hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()

    def is_token(self, word: str) -> bool:
        return self.token is not None and hmac.compare_digest(word.encode(), self.token.encode())

    def is_cookie(self, word: str) -> bool:
        return self.token is not None and hmac.compare_digest(word.encode(), self.cookie.encode())


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request states about its origin; "" where it states nothing."""

    method: str
    path: str
    host: str
    origin: str = ""
    fetch_site: str = ""
    authorization: str = ""
    cookie: str = ""
    transfer: str = ""
    length: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP status and the words for it."""

    status: int
    error: str
    hint: str = ""


def refusal(rules: Rules, asked: Asked) -> Refusal | None:
    """Why this request is not passed on; None: it is."""
    if rules.local and _name_of(asked.host) not in LOCAL_NAMES:
        return Refusal(
            421, f"this dashboard is not called {asked.host!r}", "open it as http://localhost or http://127.0.0.1"
        )
    if asked.method not in READING and not _from_here(asked):
        return Refusal(403, "another site's page asked for this change", "change it on the dashboard's own page")
    if asked.transfer or (asked.length.isascii() and asked.length.isdigit() and int(asked.length) > MOST_BODY_BYTES):
        return Refusal(413, f"a request has {MOST_BODY_BYTES} bytes at most, and says how many (Content-Length)")
    if rules.token is None or asked.path in OPEN_PATHS or asked.path.startswith(OPEN_FOLDER):
        return None
    kind, _, word = asked.authorization.partition(" ")
    if (kind.lower() == "bearer" and rules.is_token(word.strip())) or rules.is_cookie(asked.cookie):
        return None
    return Refusal(
        401,
        "the dashboard's token is needed",
        "open the address that vgpuctl dashboard printed, or send the header Authorization: Bearer TOKEN",
    )


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _from_here(asked: Asked) -> bool:
    """Browsers say where a change comes from; other programs do not, and no site can make them send anything."""
    if asked.origin:
        return urlsplit(asked.origin).netloc.lower() == asked.host.lower()
    return asked.fetch_site in {"", "same-origin", "none"}


class Guard:
    """ASGI: refuses, exchanges the token for the cookie, and adds the headers that keep a page to its own host."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        response = await self._answer(scope, receive)
        await (response or self._app)(scope, receive, send_guarded)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        headers = Headers(scope=scope)
        asked = Asked(
            method=scope["method"],
            path=scope["path"],
            host=headers.get("host", ""),
            origin=headers.get("origin", ""),
            fetch_site=headers.get("sec-fetch-site", ""),
            authorization=headers.get("authorization", ""),
            cookie=_cookie(headers.get("cookie", ""), self._rules.cookie_name),
            transfer=headers.get("transfer-encoding", ""),
            length=headers.get("content-length", ""),
        )
        # A browser names no origin on a plain navigation. A client that has the token may come from any site.
        offered = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        refused = refusal(self._rules, asked)
        page = asked.method in READING and not asked.path.startswith("/api/")
        if (refused is None or refused.status == 401) and page and offered and self._rules.is_token(offered):
            return self._exchanged(asked.path)
        if refused is None and asked.path == LOGIN_PATH:
            return await self._log_in(asked, receive)
        if refused is None:
            return None
        if refused.status == 401 and page and "text/html" in headers.get("accept", ""):
            return FileResponse(STATIC / "login.html", status_code=401)
        code = ErrorCode.NOT_YOURS if refused.status in {401, 403} else ErrorCode.INVALID
        body = {"code": code.value, "error": refused.error, "hint": refused.hint}
        challenge = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
        return JSONResponse(body, status_code=refused.status, headers=challenge)

    async def _log_in(self, asked: Asked, receive: Receive) -> Response:
        """The form of the page that asks for the token."""
        if asked.method == "POST":
            form = parse_qs((await _body(receive)).decode("utf-8", "replace"))
            if self._rules.token is None or self._rules.is_token(form.get("token", [""])[0].strip()):
                return self._exchanged("/")
        return FileResponse(STATIC / "login.html", status_code=401)

    def _exchanged(self, path: str) -> Response:
        """Redirect to an address without the token, because addresses are shown, kept in histories, and copied."""
        response = RedirectResponse("/" + path.lstrip("/"), status_code=303)
        if self._rules.token is not None:
            response.set_cookie(self._rules.cookie_name, self._rules.cookie, httponly=True, samesite="strict")
        return response


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(body)
