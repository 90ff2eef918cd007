"""Many clients at once on the smallest cache that works: some read slowly, some leave, and no answer may differ.

The server is a process of its own with a tiny random model; the clients are coroutines of this one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from ..server.test_process import COMMAND

#: One step of the model differs by rounding with what else is in the batch; a token this much likelier than the next
#: in nats is sampled all the same.
CLEAR = 0.05
SHORTEST, LONGEST = 4, 160
OPTIONS = [
    "--artifact", "hadamard", "--sink", "16", "--recent", "32", "--page-size", "16", "--max-model-len", "512",
    "--max-num-seqs", "32", "--max-batched-tokens", "128", "--max-waiting", "1000", "--prefill-mode", "rule",
    "--dtype", "float32", "--device", "cpu", "--threads", "1", "--port", "0", "--served-model-name", "tiny",
    "--log-level", "warning",
]  # fmt: skip


def smallest_cache(model: Path) -> str:
    """The least ``--kv-cache-memory`` that the server takes with :data:`OPTIONS`, as its refusal of less names it."""
    refused = subprocess.run(
        [*COMMAND, str(model), *OPTIONS, "--kv-cache-memory", "1KiB"], capture_output=True, text=True, check=False
    )
    named = re.search(r"give ([\d.]+) MiB", refused.stderr)
    assert named, refused.stderr
    return f"{float(named[1]) + 0.1:.1f}MiB"  # the message is rounded


@dataclass(frozen=True)
class Case:
    """A request and the answer that it gets alone."""

    prompt: str
    max_tokens: int
    answer: str

    def body(self, **fields: Any) -> dict[str, Any]:
        """The request."""
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def find_cases(client: httpx.Client, count: int, rng: random.Random) -> list[Case]:
    """Random prompts, half of them with a shared beginning, up to the first token that is not clear."""
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(200)]
    shared = " ".join(words[:20])
    cases: list[Case] = []
    while len(cases) < count:
        text = " ".join(rng.choices(words, k=rng.randint(1, 40)))
        prompt = f"{shared} {text}" if rng.random() < 0.5 else text
        asked = min(rng.randint(SHORTEST, LONGEST), 500 - len(prompt))
        body = {"prompt": prompt, "max_tokens": asked, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        scored = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["logprobs"]
        tops = [sorted(top.values(), reverse=True) for top in scored["top_logprobs"]]
        unclear = (i for i, top in enumerate(tops) if len(top) < 2 or top[0] - top[1] < CLEAR)
        clear = next(unclear, asked)
        if clear < SHORTEST:
            continue
        case = Case(prompt, clear, "")
        alone = client.post("/v1/completions", json=case.body()).raise_for_status().json()
        cases.append(Case(prompt, clear, alone["choices"][0]["text"]))
    return cases


@dataclass
class Report:
    """What the clients saw.

    Attributes
    ----------
    requests
        How many of each kind ended as they were meant to.
    wrong
        Answers that differ from the one given alone, with their case.
    failed
        Anything else that went wrong.
    gaps
        Seconds between two events of a stream whose client reads at once.
    memory
        ``(seconds since the start, resident bytes of the server)``.
    """

    requests: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Case, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)

    def memory_growth(self) -> float:
        """Median of the last fifth minus that of the second fifth, in bytes."""
        fifth = len(self.memory) // 5

        def median(samples: list[tuple[float, int]]) -> int:
            return sorted(size for _, size in samples)[len(samples) // 2]

        return median(self.memory[-fifth:]) - median(self.memory[fifth : 2 * fifth])

    def gap(self, quantile: float) -> float:
        """Quantile of the gaps, in seconds."""
        return sorted(self.gaps)[int(quantile * (len(self.gaps) - 1))]


class Soak:
    """``clients`` clients that ask one request after another for ``seconds``."""

    def __init__(self, url: str, pid: int, cases: list[Case], *, clients: int, seconds: float, seed: int = 0) -> None:
        self.report = Report()
        self._url, self._cases = url, cases
        self._server = psutil.Process(pid)
        self._clients, self._seconds, self._seed = clients, seconds, seed
        self._until = 0.0

    def run(self) -> Report:
        """Run, wait until the server is idle, and read its gauges."""
        asyncio.run(self._run())
        with httpx.Client(base_url=self._url, timeout=60) as client:
            self.report.gauges = wait_until_idle(client)
            for case in self._cases:  # nothing wrong is left in the prefix cache
                self._compare(case, client.post("/v1/completions", json=case.body()).json()["choices"][0]["text"])
        return self.report

    async def _run(self) -> None:
        started = time.monotonic()
        self._until = started + self._seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            work = [self._client(client, random.Random(f"{self._seed}-{i}")) for i in range(self._clients)]
            watching = asyncio.create_task(self._watch(started))
            await asyncio.gather(*work)
            watching.cancel()

    async def _watch(self, started: float) -> None:
        while True:
            self.report.memory.append((time.monotonic() - started, self._server.memory_info().rss))
            await asyncio.sleep(1)

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        kinds = {
            self._whole: 30, self._stream: 30, self._slow: 10, self._leave_stream: 15, self._leave_whole: 10,
            self._abandon: 5,
        }  # fmt: skip
        while time.monotonic() < self._until:
            kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
            try:
                await kind(client, rng.choice(self._cases), rng)
                self.report.requests[kind.__name__.strip("_")] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.report.failed.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _compare(self, case: Case, answer: str) -> None:
        if answer != case.answer:
            self.report.wrong.append((case, answer))

    async def _whole(self, client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        response = await client.post("/v1/completions", json=case.body())
        self._compare(case, response.raise_for_status().json()["choices"][0]["text"])

    async def _stream(self, client: httpx.AsyncClient, case: Case, rng: random.Random, pause: float = 0.0) -> None:
        answer, previous, done = "", None, False
        async with client.stream("POST", "/v1/completions", json=case.body(stream=True)) as response:
            async for line in response.raise_for_status().aiter_lines():
                if not line:
                    continue
                now = time.monotonic()
                if line == "data: [DONE]":
                    done = True
                    continue
                answer += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if previous is not None and not pause:
                    self.report.gaps.append(now - previous)
                previous = now
                if pause:
                    await asyncio.sleep(pause)
        if not done:
            raise ValueError("the stream ended without [DONE]")
        self._compare(case, answer)

    async def _slow(self, client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        await self._stream(client, case, rng, pause=rng.uniform(0.02, 0.1))

    async def _leave_stream(self, client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        stay = rng.randint(0, case.max_tokens)
        async with client.stream("POST", "/v1/completions", json=case.body(stream=True)) as response:
            async for _ in response.raise_for_status().aiter_lines():
                stay -= 1
                if stay <= 0:
                    return

    async def _leave_whole(self, client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        asking = asyncio.create_task(client.post("/v1/completions", json=case.body(n=2)))
        await asyncio.wait({asking}, timeout=rng.uniform(0, 3))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _abandon(self, client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        """Close the connection in the middle of the request's body."""
        address = httpx.URL(self._url)
        body = json.dumps(case.body()).encode()
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body[: rng.randint(0, len(body) - 1)])
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def gauges(client: httpx.Client) -> dict[str, float]:
    """The server's metrics by name, those of both tiers added up."""
    found: Counter[str] = Counter()
    for line in client.get("/metrics").raise_for_status().text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(found)


def wait_until_idle(client: httpx.Client, seconds: float = 120) -> dict[str, float]:
    """The metrics once no request runs or waits and no page is held."""
    deadline = time.monotonic() + seconds
    while True:
        found = gauges(client)
        held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "oscar_pages_in_use")
        if not any(found[name] for name in held):
            return found
        assert time.monotonic() < deadline, {name: found[name] for name in held}
        time.sleep(0.2)
