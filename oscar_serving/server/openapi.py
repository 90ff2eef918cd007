"""The OpenAPI document. Bodies are read by hand (``body.py``), so their schemas are put in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from oscar_serving.server.errors import ErrorResponse
from oscar_serving.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from oscar_serving.server.responses import ChatChunk

_REF = "#/components/schemas/{model}"
_BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)

_MEANINGS = {
    400: "The request is malformed, asks for something that is not supported, or does not fit the context.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type is not application/json.",
    429: "The queue is full; see Retry-After.",
    500: "The request failed inside the server.",
    503: "The server is starting or shutting down; see Retry-After.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of a route that may fail with these statuses."""
    return {status: {"model": ErrorResponse, "description": _MEANINGS[status]} for status in statuses}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads ``model``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document, made on the first call."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema(
            [*((model, "validation") for model in _BODIES), (ChatChunk, "serialization")], ref_template=_REF
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
