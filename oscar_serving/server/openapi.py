"""The OpenAPI document. Bodies are read by hand (``body.py``), so their schemas are put in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from oscar_serving.server.auth import OPEN_PATHS
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


def events(chunk: type[BaseModel]) -> dict[str, Any]:
    """The stream's content: ``schema`` describes one event, as OpenAPI before 3.2 has it."""
    schema = {
        "type": "object",
        "description": f"One event: a {chunk.__name__}, an ErrorResponse when the request fails, [DONE] at the end.",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": schema}}


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The document, made on the first call."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema(
            [*((model, "validation") for model in _BODIES), (ChatChunk, "serialization")], ref_template=_REF
        )
        components = schema.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        if needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _correct(operation["responses"])
                if needs_key and path not in OPEN_PATHS:
                    operation["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema


def _correct(responses: dict[str, Any]) -> None:
    """What FastAPI takes for granted: a 422 for every parameter, and errors in the route's own media type."""
    responses.pop("422", None)
    for status, response in responses.items():
        if int(status) >= 400:
            response["content"] = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
