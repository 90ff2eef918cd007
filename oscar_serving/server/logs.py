"""Logs: one line a request with its id, as text or as JSON, and the same id on whatever else is logged for it."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"

#: Id of the HTTP request that the running code works for.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

logger = logging.getLogger("oscar_serving.requests")

#: An id of the client's is taken over when it cannot break a log line.
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FIELDS = ("method", "path", "status", "seconds", "client")
#: Probes and scrapers ask every few seconds: they are logged at level debug.
_QUIET = frozenset({"/health", "/metrics"})


class RequestLog:
    """ASGI middleware: gives each request an id, answers with it in ``X-Request-Id``, and logs how it went."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        id = given if _SAFE.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(id)
        started = time.monotonic()
        status: int | None = None

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = id
            await send(message)

        try:
            await self._app(scope, receive, labelled)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            client = scope.get("client")
            details = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
                "client": client[0] if client else None,
            }
            logger.log(level, "request", extra=details)
            request_id.reset(token)


class _Text(logging.Formatter):
    """``time level logger message name=value …``"""

    def format(self, record: logging.LogRecord) -> str:
        parts = [self.formatTime(record), record.levelname.lower(), record.name, record.getMessage()]
        parts += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in _extra(record).items()]
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    id = getattr(record, "request_id", None)
    fields = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
    return {"request_id": id, **fields} if id else fields


def _label(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


def configure_logging(level: str, log_format: str) -> None:
    """Send this package's and uvicorn's logs to standard error in one form, at ``level`` and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    handler.addFilter(_label)
    for name in ("oscar_serving", "uvicorn"):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.propagate = False
        target.setLevel(level.upper())
