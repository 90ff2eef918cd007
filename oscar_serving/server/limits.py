"""How large a request body may be."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscar_serving.server.errors import ApiError


class BodyLimit:
    """ASGI middleware: 413 for a body over ``limit`` bytes, announced or not, without reading more of it."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting what arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._limit):
            await self._error().response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the request body is over {self._limit} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )
