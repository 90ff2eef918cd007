"""Robustness of the embedded server: soak, allocations that fail, and what the server adds to decoding.

    python -m benchmarks.robustness                          all, and the result file
    python -m benchmarks.robustness --parts soak --seconds 60
    python -m benchmarks.robustness --parts allocations      every single allocation, one run of the engine each
    python -m benchmarks.robustness --parts overhead         eight streams of SmolLM2 against the engine alone

Needs the checkout with its ``dev`` requirements: the parts are the tests of ``tests/robustness``, run for longer.
"""

from __future__ import annotations

import argparse
import platform
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.result import RESULTS, write_result

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and write the result file."""
    parts: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "soak": soak,
        "allocations": allocations,
        "overhead": overhead,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--seconds", type=float, default=600, help="of the soak")
    parser.add_argument("--clients", type=int, default=200, help="of the soak, at once")
    parser.add_argument("--rounds", type=int, default=3, help="of the overhead's measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for part in options.parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        rows += parts[part](options)
    print(write_result("robustness", rows, f"{platform.machine()} CPU, 1 thread", options.out))


def row(case: str, metric: str, unit: str, ours: float, *, must: float | None = None, direction: str = "lower") -> Row:
    """A row that is judged by itself."""
    return {
        "case": case, "metric": metric, "unit": unit, "ours": ours, "baselines": {}, "ratio": ours, "must": must,
        "aim": None, "direction": direction,
    }  # fmt: skip


def soak(options: argparse.Namespace) -> list[Row]:
    """Many clients at once, on the smallest cache."""
    from tests.robustness.soak import OPTIONS, Soak, find_cases, smallest_cache
    from tests.server.test_process import process
    from tests.server.tiny import build_model

    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder))
        memory = smallest_cache(model)
        with process(str(model), *OPTIONS, "--kv-cache-memory", memory) as (server, url, _):
            with httpx.Client(base_url=url, timeout=60) as client:
                cases = find_cases(client, 64, random.Random(0))
            report = Soak(url, server.pid, cases, clients=options.clients, seconds=options.seconds).run()
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    for case, answer in report.wrong[:5]:
        print(f"wrong: {case!r} got {answer!r}", file=sys.stderr)
    for failure in report.failed[:5]:
        print(f"failed: {failure}", file=sys.stderr)
    name = f"soak, {options.clients} clients, {options.seconds:g} s, {memory} cache"
    kinds = {
        "whole": "answers taken whole", "stream": "streams", "slow": "streams read slowly",
        "leave_stream": "streams left", "leave_whole": "answers not waited for", "abandon": "bodies cut off",
    }  # fmt: skip
    return [
        *(row(name, text, "", report.requests[kind], must=1, direction="higher") for kind, text in kinds.items()),
        row(name, "answers that differ from the one given alone", "", len(report.wrong), must=0),
        row(name, "requests failed", "", len(report.failed), must=0),
        row(name, "preemptions", "", report.gauges["vllm:num_preemptions_total"], must=1, direction="higher"),
        row(name, "pages held at the end", "", report.gauges["oscar_pages_in_use"], must=0),
        row(name, "growth of memory", "MiB", report.memory_growth() / 2**20, must=32),
        row(name, "inter-token gap, median", "ms", 1e3 * report.gap(0.5)),
        row(name, "inter-token gap, p99", "ms", 1e3 * report.gap(0.99)),
        row(name, "exit status after SIGTERM", "", status, must=0),
    ]


def allocations(options: argparse.Namespace) -> list[Row]:
    """Every allocation of tensors and of pages fails once; a wrong outcome raises."""
    from oscar_serving.cache.tier import PoolExhausted
    from tests.robustness.test_allocations import LONG, count_pages, count_tensors, fail_pages, fail_tensor
    from tests.robustness.workload import run_requests, small_engine

    expected = run_requests(small_engine(), "expected")
    counted = count_tensors()
    for at in range(len(counted.sites)):
        fail_tensor(at, expected)
    expected = run_requests(small_engine(), "expected", tokens=LONG)
    pages = count_pages(expected)
    for at in range(pages):
        for error in (PoolExhausted("injected"), MemoryError("injected")):
            fail_pages(at, error, expected)
    name = "failing allocations"
    return [
        row(name, "tensor allocations failed, one a run", "", len(counted.sites), must=1, direction="higher"),
        row(name, "places in the code", "", len(set(counted.sites)), must=1, direction="higher"),
        row(name, "page allocations failed, in two ways", "", 2 * pages, must=1, direction="higher"),
        row(name, "leaks and wrong answers", "", 0, must=0),
    ]


def overhead(options: argparse.Namespace) -> list[Row]:
    """Time of a decoding step through the server over the engine's own."""
    from benchmarks.server_overhead import BATCH, measure

    server, alone = measure(options.rounds)
    name = f"server overhead, SmolLM2-135M, {BATCH} streams"
    baseline = row(name, "time of a decoding step", "ms", 1e3 * server, must=1.05)
    return [{**baseline, "baselines": {"engine alone": 1e3 * alone}, "ratio": server / alone}]


if __name__ == "__main__":
    main()
