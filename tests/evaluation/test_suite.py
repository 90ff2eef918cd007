"""All task metrics together, on two simulated caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oscar_serving.evaluation.configuration import bf16, plain
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.simulated import SimulatedClient
from oscar_serving.evaluation.suite import PARTS, run_suite
from oscar_serving.evaluation.tasks import Task
from oscar_serving.evaluation.texts import read_texts
from tests.engine.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def clients() -> list[SimulatedClient]:
    judged = EvaluatedModel(tiny_model("llama"), byte_tokenizer())
    return [SimulatedClient(judged, c) for c in (bf16(), plain("<rough>", judged.config, "none", sink=0, recent=1))]


def test_all_parts(clients: list[SimulatedClient], tmp_path: Path):
    told: list[str] = []
    content = run_suite(
        clients, tmp_path, parts=PARTS, filler=read_texts([])[0][1][:20_000], lengths=[800], needle_texts=1,
        conversations=1, prompts=["one", "two"], max_tokens=8, tasks=[Task("4", "2+2=", max_tokens=4)],
        progress=lambda what, *_: told.append(what),
    )  # fmt: skip
    assert json.loads((tmp_path / "tasks.json").read_text()) == content
    assert [len(content[p]) for p in PARTS] == [2, 2, 1, 2]
    assert sum(c["asked"] for c in content["needles"][0]["cells"]) == 5
    assert content["drift"][0]["equal"] < 1
    page = (tmp_path / "tasks.html").read_text()
    assert page.count("&lt;rough&gt;") == 4
    assert "needles, BF16" in told


def test_what_is_missing(clients: list[SimulatedClient]):
    for options, message in (
        ({"parts": ["colour"]}, "part 'colour'"),
        ({"parts": ["needles"]}, "needs filler"),
        ({"parts": ["tasks"]}, "needs tasks"),
        ({"parts": ["drift"]}, "needs prompts"),
    ):
        with pytest.raises(EvaluationError, match=message):
            run_suite(clients, **options)
    with pytest.raises(EvaluationError, match="distinct"):
        run_suite([clients[0], clients[0]])
