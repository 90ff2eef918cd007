"""Random but reproducible work for a pool, with many shared beginnings."""

from __future__ import annotations

import random

from oscar_serving.config import OscarConfig

from .simulator import Simulator


def prompt(family: int, fork_at: int, length: int) -> list[int]:
    """``length`` tokens; prompts of one family agree up to ``fork_at``, those of all families for a page."""
    return [0 if i < 16 else family if i < fork_at else family + 10 for i in range(length)]


def run(simulator: Simulator, seed: int, steps: int) -> None:
    """Admit, append, fork, finish and preempt at random; checks after every step."""
    rng = random.Random(seed)
    waiting: list[tuple[list[int], str]] = []
    for number in range(steps):
        running = list(simulator.running)
        action = rng.choice(["admit", "admit", "step", "step", "step", "step", "fork", "finish", "preempt"])
        if action == "admit" or not running:
            tokens, salt = (
                prompt(rng.randrange(3), rng.choice([32, 48, 80]), rng.randrange(1, 130)),
                rng.choice(["", "", "b"]),
            )
            if waiting and rng.random() < 0.5:
                tokens, salt = waiting.pop()
            if len(running) < 4:
                simulator.admit(str(number), tokens, salt)
        elif action == "step":
            name = rng.choice(running)
            request = simulator.running[name]
            left = len(request.tokens) - request.computed
            count = rng.randint(1, left) if left else rng.choice([1, 1, 1, 17])
            abandoned = rng.choice([0, 0, 0, 1, 40])
            if not simulator.step(name, count, generated=rng.randrange(2), abandoned=abandoned):
                victim = simulator.preempt(running[-1])
                waiting.append((victim.tokens, victim.salt))
        elif action == "fork":
            simulator.fork(rng.choice(running), str(number))
        elif action == "finish":
            simulator.finish(rng.choice(running))
        else:
            victim = simulator.preempt(rng.choice(running))
            waiting.append((victim.tokens, victim.salt))
        simulator.check()
    for name in list(simulator.running):
        simulator.finish(name)
    simulator.check()
    stats = simulator.pool.stats()
    assert stats.quantized.used == stats.windows.used == 0, "pages leaked"


def run_everywhere(steps: int = 400) -> list[Simulator]:
    """The same on pools of several shapes, tiny ones among them."""
    simulators = []
    for seed, (sink, recent, pages, window_pages) in enumerate(
        [(16, 20, 40, 30), (24, 40, 24, 20), (0, 1, 30, 10), (40, 16, 60, 50), (16, 33, 20, 60), (2**31 - 1, 1, 40, 40)]
    ):
        simulator = Simulator(
            OscarConfig(sink=sink, recent=recent, page_size=16), pages=pages, window_pages=window_pages
        )
        run(simulator, seed, steps)
        simulators.append(simulator)
    return simulators
