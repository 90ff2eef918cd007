"""The API key and the limit on bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from oscar_serving.engines.hf import Engine
from oscar_serving.server import ServerSettings

from .conftest import Served, serve
from .test_errors import error_of

KEY = "sésame-open"


@pytest.fixture(scope="module")
def guarded(load: Callable[..., Engine]) -> Iterator[Served]:
    with serve(load(), api_key=KEY, max_body_bytes=4096, served_model_names=("a", "b")) as running:
        yield running


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


def test_open_routes(guarded: Served) -> None:
    for path in ("/health", "/version"):
        assert guarded.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/redoc",
        "/tokenizer_info",
        "/nothing",
        "//health",
        "/health/",
    ],
)
def test_every_other_route_wants_the_key(guarded: Served, path: str) -> None:
    error = error_of(guarded.client.get(path), 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health"])
def test_nothing_is_read_without_the_key(guarded: Served, path: str) -> None:
    status = 405 if path == "/health" else 401
    error_of(guarded.client.post(path, content=b"x" * 100_000), status if status == 401 else 413)


@pytest.mark.parametrize("key", ["x", KEY[:-1], KEY + "x", KEY.upper(), "sesame-open"])
def test_wrong_keys(guarded: Served, key: str) -> None:
    error_of(guarded.client.get("/v1/models", headers=bearer(key)), 401)


@pytest.mark.parametrize("header", ["", "Bearer", KEY, f"Token {KEY}", "Basic ???", "Basic Og=="])
def test_other_schemes(guarded: Served, header: str) -> None:
    error_of(guarded.client.get("/v1/models", headers={b"Authorization": header.encode()}), 401)


def test_right_key(guarded: Served) -> None:
    assert guarded.client.get("/v1/models", headers=bearer(KEY)).status_code == 200
    lower = {b"authorization": b"bearer " + KEY.encode()}
    assert guarded.client.get("/v1/models", headers=lower).status_code == 200


def test_browser_gets_in_by_password_but_other_sites_do_not(guarded: Served) -> None:
    asked = guarded.client.get("/")
    assert asked.headers["www-authenticate"].startswith("Basic")
    assert guarded.client.get("/v1/models", auth=("any", KEY)).status_code == 200
    assert guarded.client.get("/v1/models", auth=("any", "wrong")).status_code == 401
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401)):
        response = guarded.client.get("/v1/models", auth=("any", KEY), headers={"Sec-Fetch-Site": site})
        assert response.status_code == status


def test_body_limit(guarded: Served) -> None:
    headers = {**bearer(KEY), b"Content-Type": b"application/json"}
    fits = b'{"prompt": "' + b"x" * 3000 + b'"}'
    assert guarded.client.post("/tokenize", content=fits, headers=headers).status_code == 200
    long = b'{"prompt": "' + b"x" * 5000 + b'"}'
    error_of(guarded.client.post("/tokenize", content=long, headers=headers), 413)
    unannounced = (long[i : i + 100] for i in range(0, len(long), 100))
    error_of(guarded.client.post("/tokenize", content=unannounced, headers=headers), 413)


def test_several_names_for_one_model(guarded: Served) -> None:
    listed = guarded.client.get("/v1/models", headers=bearer(KEY)).json()["data"]
    assert [card["id"] for card in listed] == ["a", "b"]
    for name in ("a", "b"):
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        answer = guarded.client.post("/v1/completions", json=body, headers=bearer(KEY)).json()
        assert answer["model"] == name


def test_document_says_which_routes_need_the_key(guarded: Served) -> None:
    document = guarded.client.get("/openapi.json", headers=bearer(KEY)).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in ("/health", "/version"))
            assert "422" not in operation["responses"]


def test_empty_key_is_no_key_at_all() -> None:
    with pytest.raises(ValueError, match="api_key is empty"):
        ServerSettings(api_key=" ")
