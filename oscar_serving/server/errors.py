"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from oscar_serving.engines.hf import RequestError

logger = logging.getLogger(__name__)

#: Seconds that a client is asked to wait before it tries again.
RETRY_AFTER = {"queue_full": 1, "shutting_down": 5}

_STATUS = {"queue_full": 429, "shutting_down": 503, "duplicate_request": 500, "internal_error": 500}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ErrorDetail(BaseModel):
    """What went wrong; ``param`` names the field, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every response with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with an HTTP status, raised anywhere while a request is handled."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(
            message=message, type=_TYPES.get(status, "invalid_request_error"), param=param, code=code
        )
        self.headers = headers or {}

    @classmethod
    def of(cls, error: RequestError) -> ApiError:
        """The engine's refusal or failure as an HTTP error."""
        status = _STATUS.get(error.code, 400)
        wait = RETRY_AFTER.get(error.code)
        headers = {"Retry-After": str(wait)} if wait else None
        return cls(status, str(error), param=error.param, code=error.code, headers=headers)

    def body(self) -> ErrorResponse:
        """The response's body, also sent inside a stream that fails."""
        return ErrorResponse(error=self.detail)

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body().model_dump(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of ``app`` OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(
            error.status_code, message, code=_CODES.get(error.status_code), headers=dict(error.headers or {})
        ).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError(500, "internal error; the server's log has the details", code="internal_error").response()
