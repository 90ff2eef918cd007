"""Request bodies: JSON read defensively, then validated against a model."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from oscar_serving.server.errors import ApiError, bad_request

#: Deepest nesting of lists and objects; real requests have fewer than ten levels outside of tool schemas.
MAX_DEPTH = 64

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, timeout: float) -> dict[str, Any]:
    """The body as a JSON object.

    Raises
    ------
    ApiError
        415 for another content type (which also keeps other sites' forms out), 408 for a body that does not
        arrive in ``timeout`` seconds, 400 for anything that is not a JSON object of valid Unicode and finite
        numbers.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(
            415, f"content type {media or 'missing'!r}: send application/json", code="unsupported_media_type"
        )
    try:
        body = await asyncio.wait_for(request.body(), timeout)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise bad_request("the client went away before the body was complete") from None
    return parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly; see :func:`read_json`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 (byte {error.start})", code="invalid_json") from None
    except RecursionError:
        raise bad_request(f"the body nests deeper than {MAX_DEPTH} levels", code="invalid_json") from None
    except ValueError as error:  # malformed JSON, or an integer of thousands of digits
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    _check_values(value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_values(value: Any) -> None:
    """Refuse what JSON lets through but no field can mean: half surrogate pairs, 1e999, deep nesting."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for container in level:
            for item in (*container, *container.values()) if isinstance(container, dict) else container:
                if isinstance(item, dict | list):
                    deeper.append(item)
                elif isinstance(item, str):
                    _check_text(item)
                elif isinstance(item, float) and not math.isfinite(item):
                    raise bad_request("the body holds a number too large for a 64-bit float", code="invalid_json")
        if not deeper:
            return
        level = deeper
    raise bad_request(f"the body nests deeper than {MAX_DEPTH} levels", code="invalid_json")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request("the body holds half of a surrogate pair, which is not text", code="invalid_json") from None


def validate(model: type[Model], data: dict[str, Any]) -> Model:
    """``data`` as ``model``; the first failure becomes a 400 that names the field and what is allowed."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        failures = error.errors(include_url=False, include_context=False)
        places = [".".join(str(part) for part in failure["loc"] if not _is_union_tag(part)) for failure in failures]
        # Of a union's branches, the one that was meant got furthest.
        first, place = max(zip(failures, places, strict=True), key=lambda pair: pair[1].count("."))
        message = f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}" if place else first["msg"]
        if first["type"] != "missing":
            message += f" (got {_shown(first['input'])})"
        raise bad_request(message, param=place or None, code="invalid_parameter") from None


def _is_union_tag(part: int | str) -> bool:
    """Whether a part of an error's place is the Python type of a union's branch: no client knows it."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or bool(re.search(r"[^\w.]", part)))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
