"""Evaluation and benchmark clients, each a command of an environment of its own (``launch/test-clients.sh``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import KEY, MODEL, Endpoint

pytestmark = pytest.mark.model

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0},
    {"question": "One, two, three,", "choices": [" nine", " four"], "answer": 1},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{rest}
"""
SCORED = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
GENERATED = """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Folder with two tasks of lm-evaluation-harness: log-likelihoods of choices, and generated text."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, rest in (("scored", SCORED), ("generated", GENERATED)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest))
    return tmp_path


def evaluated(folder: Path) -> dict[str, dict[str, float]]:
    """Results by task."""
    [path] = folder.rglob("results*.json")
    results: dict[str, dict[str, float]] = json.loads(path.read_text())["results"]
    return results


def test_lm_eval_completions(endpoint: Endpoint, tasks: Path, client_in: Callable[..., str]) -> None:
    arguments = f"model={MODEL},base_url={endpoint.url}/v1/completions,tokenizer={endpoint.folder},num_concurrent=2"
    client_in(
        "OSCAR_CLIENTS_VENV", "lm-eval", "run", "--model", "local-completions", "--model_args",
        f"{arguments},max_length=2048", "--tasks", "scored,generated", "--include_path", tasks, "--output_path", "out",
    )  # fmt: skip
    results = evaluated(tasks / "out")
    assert results["scored"]["acc,none"] == 1
    assert "exact_match,none" in results["generated"]


def test_lm_eval_chat(endpoint: Endpoint, tasks: Path, client_in: Callable[..., str]) -> None:
    client_in(
        "OSCAR_CLIENTS_VENV", "lm-eval", "run", "--model", "local-chat-completions", "--model_args",
        f"model={MODEL},base_url={endpoint.url}/v1/chat/completions,num_concurrent=2", "--apply_chat_template",
        "--tasks", "generated", "--include_path", tasks, "--output_path", "out",
    )  # fmt: skip
    assert "exact_match,none" in evaluated(tasks / "out")["generated"]


def test_guidellm(endpoint: Endpoint, tmp_path: Path, client_in: Callable[..., str]) -> None:
    client_in(
        "OSCAR_CLIENTS_VENV", "guidellm", "run",
        "--backend", f"kind=openai_http,target={endpoint.url},model={MODEL},api_key={KEY}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={endpoint.folder}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress",
    )  # fmt: skip
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(
    endpoint: Endpoint, tmp_path: Path, client_in: Callable[..., str], backend: str, path: str
) -> None:
    client_in(
        "OSCAR_VLLM_VENV", "vllm", "bench", "serve", "--backend", backend, "--base-url", endpoint.url,
        "--endpoint", path, "--model", MODEL, "--tokenizer", endpoint.folder, "--dataset-name", "random",
        "--num-prompts", "4", "--random-input-len", "40", "--random-output-len", "8", "--ignore-eos",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (4, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 32)


def test_sglang_benchmark_serving(endpoint: Endpoint, tmp_path: Path, client_in: Callable[..., str]) -> None:
    client_in(
        "OSCAR_SGLANG_VENV", "python", "-m", "sglang.benchmark.serving", "--backend", "vllm",
        "--base-url", endpoint.url, "--model", MODEL, "--tokenizer", endpoint.folder, "--dataset-name", "random-ids",
        "--num-prompts", "4", "--random-input-len", "40", "--random-output-len", "8", "--random-range-ratio", "1",
        "--output-file", tmp_path / "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (4, 32)
