"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oscar_serving.server.errors import ApiError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was there."""


def event(chunk: BaseModel) -> bytes:
    """One event: the fields that were given, as JSON."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode("utf-8") + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, cancelled when the client goes away.

    Raises
    ------
    ClientGone
        It did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A stream of events that ends with ``[DONE]``.

    An error after the first byte is an event of its own, since the status is sent. ``close`` is called
    however the stream ends: to its end, by an error, or because the client went away, even before the first
    event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the client closed while an event was written: the same as going away
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            failure = ApiError(500, "internal error; the server's log has the details", code="internal_error")
            await send({"type": "http.response.body", "body": event(failure.body()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
