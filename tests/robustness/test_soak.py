"""The soak for a minute; ``benchmarks/robustness.py`` runs it for ten."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import httpx
import pytest

from ..server.test_process import process
from ..server.tiny import build_model
from .soak import OPTIONS, Soak, find_cases, smallest_cache

SECONDS = 60


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    memory = smallest_cache(model)
    with process(str(model), *OPTIONS, "--kv-cache-memory", memory) as (server, url, _):
        with httpx.Client(base_url=url, timeout=60) as client:
            cases = find_cases(client, 24, random.Random(0))
        report = Soak(url, server.pid, cases, clients=200, seconds=SECONDS).run()
        assert report.failed == []
        assert report.wrong == []
        for kind in ("whole", "stream", "slow", "leave_stream", "leave_whole", "abandon"):
            assert report.requests[kind] > 0, kind
        assert report.gauges["vllm:num_preemptions_total"] > 0  # the cache was too small for all
        assert report.gauges["oscar_requests_failed_total"] == 0
        assert report.memory_growth() < 32 << 20
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
