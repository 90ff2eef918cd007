"""Request ids and log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from oscar_serving.server import logs

from .conftest import Served


def test_every_answer_carries_an_id(served: Served) -> None:
    first, second = (served.client.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert served.client.get("/nothing", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "a b", 'x"y', "x" * 129])
def test_ids_that_could_break_a_log_line_are_replaced(served: Served, given: str) -> None:
    answered = served.client.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert answered != given
    assert len(answered) == 32


@pytest.fixture
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("oscar_serving", "uvicorn")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_json_lines_of_a_request(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("info", "json")
    served.client.get("/v1/models", headers={"X-Request-Id": "abc"})
    served.client.get("/health")
    [line] = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert line["message"] == "request"
    assert (line["request_id"], line["method"], line["path"], line["status"]) == ("abc", "GET", "/v1/models", 200)
    assert line["client"] == "127.0.0.1"
    assert line["seconds"] >= 0


@pytest.mark.usefixtures("restored")
def test_text_lines_stay_one_line(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("info", "text")
    served.client.get("/a%0Ab")
    [line] = capfd.readouterr().err.splitlines()
    assert 'path="/a\\nb"' in line
    assert "status=404" in line
