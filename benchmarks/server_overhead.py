"""What the embedded server adds to decoding: the same eight requests by HTTP streams, and straight to the engine.

A part of :mod:`benchmarks.robustness`. Both runs use one loaded engine in this process, so that the server's work
competes with the engine's for the interpreter as it does in service; the clients are a process of their own. Steps are
timed in the second half of each run, when all eight decode.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oscar_serving.engines.hf import Engine

BATCH = 8
TOKENS = 64
PROMPT = 64
#: Streams the requests and does nothing else with what comes.
CLIENT = """
import json, sys, threading, httpx
url, batch, tokens, prompt = sys.argv[1], *map(int, sys.argv[2:])
def one(index):
    body = {"prompt": [100 + index] * prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body["stream"] = True
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            pass
    assert line == "" or line == "data: [DONE]", line
threads = [threading.Thread(target=one, args=(index,)) for index in range(batch)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


class StepClock:
    """Times at which the engine's steps with a full batch ended."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self.ends: list[float] = []
        self._engine = engine
        engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> bool:
        busy = self._step()
        if self._engine.stats().running == BATCH:
            self.ends.append(time.perf_counter())
        return busy

    def take(self) -> float:
        """Median seconds between steps of the second half, and start anew."""
        ends, self.ends = self.ends[len(self.ends) // 2 :], []
        return median(after - before for before, after in itertools.pairwise(ends))


def measure(rounds: int) -> tuple[float, float]:
    """Seconds of a step of eight rows: through the server, and without it; the medians of alternating rounds."""
    from oscar_serving.engines.hf import Engine, EngineOptions, RequestOutput, SamplingParams
    from oscar_serving.models import get_model
    from tests.server.conftest import serve

    engine = Engine.load(get_model("smollm2"), EngineOptions(threads=1, prefix_caching=False, max_num_seqs=BATCH))
    clock = StepClock(engine)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    server, alone = [], []

    def straight(name: str) -> None:
        ended = threading.Semaphore(0)

        def on_output(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                ended.release()

        for index in range(BATCH):
            engine.submit(f"{name}-{index}", [100 + index] * PROMPT, params, on_output)
        for _ in range(BATCH):
            ended.acquire()

    with serve(engine) as served:
        for turn in range(rounds + 1):
            straight(f"straight-{turn}")
            alone.append(clock.take())
            arguments = [served.url, str(BATCH), str(TOKENS), str(PROMPT)]
            subprocess.run([sys.executable, "-c", CLIENT, *arguments], check=True)
            server.append(clock.take())
    return median(server[1:]), median(alone[1:])  # the first round compiles and warms
