"""Who may ask: one API key, compared in constant time, for every route that is not listed as open."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oscar_serving.server.errors import ApiError

#: Routes without secrets that probes call.
OPEN_PATHS = frozenset({"/health", "/version"})


class ApiKeyGuard:
    """ASGI middleware; everything but :data:`OPEN_PATHS` needs the key, also routes that do not exist.

    The key comes as ``Authorization: Bearer KEY``. A browser that opens the dashboard sends it as the
    password of HTTP Basic (any user name); since browsers attach that to requests of other sites too, such
    requests are refused.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Basic realm="oscar", charset="UTF-8"' if scope["path"] == "/" else "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        given = credentials.strip().encode("latin-1")
        if scheme.lower() == "basic":
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                return False
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(_digest(given), self._digest)


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that the comparison does not tell the key's."""
    return hashlib.sha256(key).digest()
