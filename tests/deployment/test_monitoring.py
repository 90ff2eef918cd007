"""The Grafana dashboard and the alerts name metrics that the servers export."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .tools import DOCKER

if TYPE_CHECKING:
    from tests.server.conftest import Served

DASHBOARD: dict[str, Any] = json.loads((DOCKER / "grafana" / "dashboards" / "oscar.json").read_text())
NAME = re.compile(r"\b(?:vllm:|sglang:|oscar_)[a-z0-9_]+")


def expressions() -> list[str]:
    """Every query of the dashboard, and the text of the alerts."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*queries, (DOCKER / "prometheus" / "alerts.yml").read_text()]


def named(prefix: str) -> set[str]:
    """Metrics of ``prefix`` in the queries."""
    return {name for text in expressions() for name in NAME.findall(text) if name.startswith(prefix)}


def test_queries_name_only_metrics_that_the_embedded_server_exports(served: Served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
    scrape = served.client.get("/metrics").text
    exported = {sample.name for family in text_string_to_metric_families(scrape) for sample in family.samples}
    wanted = named("vllm:") | named("oscar_")
    assert len(wanted) > 15
    assert not wanted - exported


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_queries_name_only_metrics_of_the_engine(engine: str) -> None:
    """Read from the engine's source: it exports metrics on a GPU alone."""
    spec = importlib.util.find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{engine} is not installed: ./launch/test-{engine}.sh makes an environment with it")
    [package] = spec.submodule_search_locations
    sources = [path.read_text(encoding="utf-8") for path in Path(package).rglob("*metric*.py")]
    sources += [path.read_text(encoding="utf-8") for path in Path(package).glob("v1/metrics/*.py")]
    known = {name for text in sources for name in re.findall(rf'"({engine}:[a-z0-9_]+)"', text)}
    for name in named(f"{engine}:"):
        assert {name, re.sub(r"_(total|bucket)$", "", name)} & known, name


def test_dashboard_is_one_that_grafana_loads() -> None:
    """What its JSON must have beside the queries: ids, places that do not overlap, the provisioned source."""
    provisioned = (DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    assert f"uid: {DASHBOARD['panels'][0]['datasource']['uid']}" in provisioned
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
