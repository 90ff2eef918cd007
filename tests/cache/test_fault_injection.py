"""An allocation fails, at every point at which there is one: nothing is leaked, and what goes on is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oscar_serving.cache.pool import PoolExhausted
from oscar_serving.cache.tier import Tier
from oscar_serving.config import OscarConfig

from .simulator import Simulator
from .workload import prompt


class Failing:
    """Wraps a method: call number ``at`` raises instead."""

    def __init__(self, method: Callable[..., object], at: int, error: BaseException) -> None:
        self._method, self._at, self._error = method, at, error
        self.calls = 0

    def __get__(self, instance: object, owner: type) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.calls += 1
            if self.calls == self._at:
                raise self._error
            return self._method(instance, *args)

        return call


def work(simulator: Simulator) -> int:
    """A few requests that share, fork, evict and come back; a step that fails is tried again. Returns the failures."""
    failures = 0

    def step(name: str, count: int, generated: int = 0) -> None:
        nonlocal failures
        tables = tuple(map(list, simulator.pool.table(name)))
        try:
            done = simulator.pool.reserve(name, count)
        except MemoryError:
            done = False
        if not done:
            failures += 1
            assert tuple(map(list, simulator.pool.table(name))) == tables
            simulator.check()
        assert simulator.step(name, count, generated)
        simulator.check()

    for turn in range(3):
        tokens = prompt(turn % 2, 48, 90)
        for name in ("a", "b"):
            simulator.admit(name, tokens)
            while left := len(tokens) - simulator.running[name].computed:
                step(name, min(40, left))
        simulator.fork("a", "child")
        for name in ("a", "b", "child"):
            for _ in range(20):
                step(name, 1, generated=turn)
        again = simulator.preempt("b")
        simulator.admit("b", again.tokens)
        step("b", 20, generated=turn)
        for name in ("a", "b", "child"):
            simulator.finish(name)
            simulator.check()
    stats = simulator.pool.stats()
    assert stats.quantized.used == stats.windows.used == 0
    return failures


def make() -> Simulator:
    return Simulator(OscarConfig(sink=16, recent=33, page_size=16), pages=26, window_pages=26)


def allocations() -> int:
    """Calls of :meth:`Tier.take` in :func:`work`."""
    with pytest.MonkeyPatch.context() as patch:
        counter = Failing(Tier.take, -1, MemoryError())
        patch.setattr(Tier, "take", counter)
        assert work(make()) == 0
    return counter.calls


@pytest.mark.parametrize("error", [PoolExhausted("injected"), MemoryError("injected")])
def test_every_allocation_may_fail(error: Exception) -> None:
    total = allocations()
    assert total > 40
    for at in range(1, total + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tier, "take", Failing(Tier.take, at, error))
            assert work(make()) == 1


def test_exhausted_in_the_middle_of_taking() -> None:
    """:meth:`Tier.take` gives all or nothing."""
    tier = Tier(4)
    assert tier.take(2) == [1, 2]
    with pytest.raises(PoolExhausted, match="2 pages asked for, 1 available"):
        tier.take(2)
    assert (tier.free, tier.references) == ([3], [0, 1, 1, 0])
    tier.put_back([2])
    assert tier.take(2) == [2, 3]
    with pytest.raises(ValueError, match="page 0: released"):
        tier.release(0, None)
