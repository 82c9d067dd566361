"""The answering end of a control link, for node and GPU Servers alike, and the asking end between them. On trio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeVar

import trio
from pydantic import BaseModel, TypeAdapter, ValidationError

from vgpu.bounds import LEAST, MOST_CARRIED
from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.loggers import get_logger
from vgpu.protocol.codec import Message, ProtocolError
from vgpu.protocol.hello import Hello, Request, Welcome
from vgpu.protocol.messages import Failure, Notice, Reply
from vgpu.protocol.stream import LINK_ENDED, MessageStream, connect
from vgpu.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from vgpu.spec import explain

log = get_logger(__name__)

HELLO_S: Final = 5.0
AnyModel = TypeVar("AnyModel", bound=BaseModel)
AnyAsked = TypeVar("AnyAsked", bound=Request)


@cache
def software_version() -> str:
    """Of the installed package; importlib parses its metadata anew for each call."""
    try:
        return version("st-vgpu")
    except PackageNotFoundError:
        return "unknown"


async def welcome(link: MessageStream, pid: int, greeted: Callable[[Hello], None] = lambda _: None) -> Hello | None:
    """Shake hands with the peer that connected. None: the peer has left, or there is no common version (and the peer
    got a ``Failure``). ``greeted`` is called before the peer is answered: what it does holds for the peer's next
    message.

    Errors: ``ProtocolError`` for a peer that sends another message first, or none.
    """
    with trio.move_on_after(HELLO_S) as patience:
        received = await link.receive()
    if patience.cancelled_caught:
        raise ProtocolError(f"the peer did not say hello within {HELLO_S:g} s")
    if received is None:
        return None
    try:
        hello = Hello.model_validate(received[0])
    except ValidationError as error:
        failure = Failure(id=0, code=ErrorCode.PROTOCOL, error=f"a link begins with hello: {explain(error)}")
        await link.send(failure.model_dump(mode="json"))
        raise ProtocolError(failure.error) from None
    common = min(hello.version, PROTOCOL_VERSION)
    if common < max(hello.oldest_version, OLDEST_VERSION):
        text = (
            f"this end speaks versions {OLDEST_VERSION} to {PROTOCOL_VERSION}, "
            f"the other {hello.oldest_version} to {hello.version}"
        )
        failure = Failure(id=hello.id, code=ErrorCode.VERSION, error=text, hint="install the same release on both ends")
        await link.send(failure.model_dump(mode="json"))
        return None
    greeted(hello)
    result = Welcome(version=common, software=software_version(), pid=pid).model_dump(mode="json")
    await link.send(Reply(id=hello.id, result=result).model_dump(mode="json"))
    return hello


async def serve(
    link: MessageStream,
    requests: TypeAdapter[AnyAsked],
    answer: Callable[[AnyAsked], Awaitable[BaseModel]],
    notices: Callable[[AnyAsked], AsyncGenerator[Notice, None] | None],
    sent: Callable[[AnyAsked], Awaitable[None]] | None = None,
    is_dropped: Callable[[AnyAsked], bool] = lambda _: False,
) -> None:
    """Answer the requests of one link, one after the other, until it ends.

    ``notices`` gives the stream of a request that is answered by one (the link ends with it), None for all others. A
    request that is refused or malformed gets its ``Failure``; the link goes on. ``sent``: called after the answer of a
    request was sent. ``is_dropped``: whether a request is given up when the asker leaves meanwhile. Errors:
    ``ProtocolError``.
    """
    while (received := await link.receive()) is not None:
        message = received[0]
        request_id = _id_of(message)
        reply: Reply | Failure
        answered: AnyAsked | None = None
        try:
            request = requests.validate_python(message)
            stream = notices(request)
            if stream is not None:
                await _stream(link, stream)
                return
            if is_dropped(request):
                result = await _while_there(link, answer(request))
                if result is None:
                    return
            else:
                result = await answer(request)
            reply = Reply(id=request_id, result=result.model_dump(mode="json"))
            answered = request
        except ValidationError as error:
            reply = Failure(id=request_id, code=ErrorCode.INVALID, error=explain(error))
        except VgpuError as error:
            reply = Failure(id=request_id, code=error.code, error=error.message, hint=error.hint)
        except Exception as error:
            # Our own fault, but one request's: the vGPUs of other users must not end with it.
            log.exception("request failed", request=message.get("op"))
            reply = Failure(
                id=request_id, code=ErrorCode.INTERNAL, error=f"an error of st-vgpu: {cleaned(repr(error))}"
            )
        await link.send(reply.model_dump(mode="json"))
        if sent is not None and answered is not None:
            await sent(answered)


async def _while_there(link: MessageStream, answer: Awaitable[BaseModel]) -> BaseModel | None:
    """The answer; None if the asker left before it was there, and then it was cancelled."""
    result: BaseModel | None = None
    refusal: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await link.until_left()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            result = await answer
        except Exception as error:
            refusal = error
        nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    return result


def _id_of(message: Message) -> int:
    """0 of one that has none, or none that an answer can carry."""
    number = message.get("id")
    return number if type(number) is int and LEAST <= number <= MOST_CARRIED else 0


async def _stream(link: MessageStream, stream: AsyncGenerator[Notice, None]) -> None:
    """Send notices until there are no more, or the other end leaves. The other end is not expected to send more.
    ``VgpuError``: the stream's own, as it was raised."""
    refusal: VgpuError | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_end, link, nursery.cancel_scope)
            async with aclosing(stream) as notices:
                async for notice in notices:
                    await link.send(notice.model_dump(mode="json"))
            nursery.cancel_scope.cancel()
    except* LINK_ENDED as ended:
        log.info("watcher left", reason=repr(ended.exceptions[0]))
    except* VgpuError as refused:
        first: BaseException = refused
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, VgpuError)
        refusal = first
    if refusal is not None:
        raise refusal


async def _until_end(link: MessageStream, scope: trio.CancelScope) -> None:
    await link.receive()
    scope.cancel()


async def open_link(path: Path, hello: Hello) -> tuple[MessageStream, Welcome]:
    """A link that has shaken hands. ``VgpuError`` (unavailable) if no process answers."""
    try:
        link = await connect(path)
    except OSError as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, f"no process answers at {path}: {error.strerror}") from error
    try:
        await link.send(hello.model_dump(mode="json"))
        with trio.move_on_after(HELLO_S):
            return link, Welcome.model_validate(checked(await link.receive()))
        raise VgpuError(ErrorCode.TIMEOUT, f"the process at {path} did not answer hello within {HELLO_S:g} s")
    except OSError as error:  # it died before it had read
        link.close()
        raise VgpuError(ErrorCode.UNAVAILABLE, f"the process at {path} is gone: {error.strerror}") from error
    except BaseException:
        link.close()
        raise


async def ask(path: Path, request: Request, model: type[AnyModel], timeout_s: float) -> AnyModel:
    """One request on a link of its own. ``VgpuError``: the other end's reason, unavailable, or timeout."""
    with trio.move_on_after(timeout_s):
        try:
            link, welcomed = await open_link(path, Hello())
            async with link:
                await link.send(request.said_to(welcomed.version))
                return model.model_validate(checked(await link.receive()))
        except LINK_ENDED as error:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the link to {path} broke: {error}") from error
    raise VgpuError(ErrorCode.TIMEOUT, f"{path} did not answer within {timeout_s:g} s")


def checked(received: tuple[dict[str, object], list[int]] | None) -> dict[str, object]:
    """The result within a reply; ``VgpuError`` if it is a failure."""
    if received is None:
        raise VgpuError(ErrorCode.UNAVAILABLE, "the other end closed the link without an answer")
    message = received[0]
    if message.get("ok") is False:
        failure = Failure.model_validate(message)
        raise VgpuError(failure.code, failure.error, failure.hint)
    result = message.get("result")
    if not isinstance(result, dict):
        raise ProtocolError("a reply without a result")
    return result
