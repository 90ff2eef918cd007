"""Task files and how answers are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oscar_serving.evaluation.client import Completion
from oscar_serving.evaluation.model import EvaluationError
from oscar_serving.evaluation.tasks import judge, read_tasks, run_tasks


@pytest.mark.parametrize(
    ("text", "answer", "strict", "flexible"),
    [
        ("So 3 + 4 = 7.\n#### 7", "work\n#### 7", True, True),
        ("So the answer is 7.", "#### 7", False, True),  # strict and flexible diverge
        ("#### 1,234", "#### 1234", True, True),
        ("#### 7.0", "#### 7", True, True),
        ("It is 7, or maybe 8", "#### 7", False, False),
        ("-5", "-5", True, True),
        ("Paris.", "Paris", True, True),
        ("The capital is Paris, of course", "paris", False, True),
        ("Lyon", "Paris", False, False),
        ("", "Paris", False, False),
    ],
)
def test_judging(text: str, answer: str, strict: bool, flexible: bool):
    assert judge(text, answer) == (strict, flexible)


def test_task_files(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    lines = [
        {"prompt": "2+2=", "answer": 4, "stop": "\n"},
        {"messages": [{"role": "user", "content": "capital of France?"}], "answer": "Paris", "max_tokens": 9},
    ]
    file.write_text("\n".join(json.dumps(x) for x in lines) + "\n\n")
    tasks = read_tasks(file)
    assert (tasks[0].answer, tasks[0].stop, tasks[0].max_tokens) == ("4", ("\n",), 256)
    client = _Answers({"2+2=": "4", "capital of France?": "It is Paris"})
    result = run_tasks(client, tasks)
    assert result.score("strict") == (0.5, pytest.approx(0.5 / 2**0.5))
    assert result.score("flexible") == (1.0, 0.0)
    content = result.to_dict()
    assert content["truncated"] == 0.5
    assert content["mean_tokens"] == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"prompt": "x"}', "needs an answer"),
        ('{"prompt": "x", "messages": [], "answer": "y"}', "needs an answer"),
        ('{"prompt": "x", "answer": "y", "colour": 1}', "unknown field 'colour'"),
        ("[1]", "line 1"),
        ("", "no tasks"),
    ],
)
def test_wrong_task_files(tmp_path: Path, line: str, message: str):
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(EvaluationError, match=message):
        read_tasks(tmp_path / "t.jsonl")


class _Answers:
    name = "answers"

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def encode(self, text: str) -> list[int]:
        return []

    def complete(self, prompt, **_):
        return Completion(self.answers[prompt], 3, True, 1, 0)

    def chat(self, messages, **_):
        return Completion(self.answers[messages[-1]["content"]], 3, False, 1, 0)
