"""Models, health, version, tokens, metrics, the OpenAPI document."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from oscar_serving import __version__

from .conftest import Served
from .tiny import CONTEXT


def test_models(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    [card] = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", CONTEXT)
    assert card["root"] == "tiny"
    assert served.client.get("/v1/models/tiny").json() == card


def test_version(served: Served) -> None:
    assert served.client.get("/version").json() == {"version": __version__}


def test_health(served: Served) -> None:
    assert served.client.get("/health").status_code == 200


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
def test_tokens_there_and_back(served: Served, text: str) -> None:
    tokens = served.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text.encode())
    assert tokens["max_model_len"] == CONTEXT
    assert served.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_tokenizer_info(served: Served) -> None:
    info = served.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<eos>", None, CONTEXT)
    assert "<tool_call>" in info["chat_template"]


def metrics(served: Served) -> dict[tuple[str, str], float]:
    """Every sample by name and tier (or reason, or nothing)."""
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, sample.labels.get("tier") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_count_what_was_done(served: Served) -> None:
    prompt = "metrics are read twice " * 10
    before = metrics(served)
    served.complete(prompt=prompt, max_tokens=7, ignore_eos=True)
    served.complete(prompt=prompt, max_tokens=7, ignore_eos=True)
    served.wait_until_idle()
    after = metrics(served)

    def gained(name: str, label: str = "") -> float:
        return after[name, label] - before[name, label]

    assert gained("vllm:prompt_tokens_total") == 2 * len(prompt)
    assert gained("vllm:generation_tokens_total") == 14
    assert gained("vllm:request_success_total", "length") == 2
    assert gained("vllm:time_to_first_token_seconds_count") == 2
    assert gained("vllm:e2e_request_latency_seconds_count") == 2
    assert gained("oscar_prefix_hit_tokens_total") == gained("vllm:prefix_cache_hits_total") > 0
    assert after["vllm:num_requests_running", ""] == after["vllm:num_requests_waiting", ""] == 0
    assert after["vllm:kv_cache_usage_perc", ""] == 0
    assert after["oscar_pages_in_use", "int2"] == 0
    assert after["oscar_pages_cached", "int2"] > 0
    assert after["oscar_tier_bytes", "int2"] > 0
    assert after["oscar_saved_bytes", ""] == after["oscar_bf16_bytes", ""] - after["oscar_cached_bytes", ""]


def test_metrics_show_pages_in_use_while_a_request_runs(served: Served) -> None:
    body = {"prompt": "x" * 200, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        during = metrics(served)
    assert during["vllm:num_requests_running", ""] == 1
    assert during["oscar_pages_in_use", "int2"] >= 200 // 16
    assert (during["oscar_pages_in_use", "window"] > 0) == (not served.engine.options.srft)
    assert 0 < during["vllm:kv_cache_usage_perc", ""] <= 1
    served.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_document_describes_bodies(served: Served, path: str) -> None:
    document = served.client.get("/openapi.json").json()
    operation = document["paths"][path]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][name]["properties"]
    assert {"200", "400", "401"} <= set(operation["responses"])
