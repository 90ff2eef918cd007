"""An allocation fails, at every place that allocates: its requests get an error, the others their right answer."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.cache.tier import PoolExhausted, Tier

from .faults import Allocations, FailingTake
from .workload import Outcome, crowded_engine, run_requests, small_engine


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """The right answers."""
    outcome = run_requests(small_engine(), "expected")
    assert outcome.failed() == []
    return outcome


def count_tensors() -> Allocations:
    """The tensor allocations of the workload."""
    engine = small_engine()
    with Allocations() as counted:
        run_requests(engine, "counted")
    return counted


def fail_tensor(at: int, expected: Outcome) -> None:
    """Run the workload with one allocation that fails, then once more on the same engine without."""
    engine = small_engine()
    with Allocations(at) as injected:
        outcome = run_requests(engine, "first", torch.OutOfMemoryError)
    assert len(injected.sites) > at
    assert outcome.failed(), f"{injected.sites[at]}: nobody was told"
    outcome.check_others(expected)
    # Nothing wrong was left in the prefix cache.
    again = run_requests(engine, "again")
    assert again.failed() == []
    again.check_others(expected)


def test_every_place_that_allocates_a_tensor_may_fail(expected: Outcome) -> None:
    """The first allocation of each place; ``benchmarks/robustness.py`` fails every single one."""
    counted = count_tensors()
    assert len(set(counted.sites)) > 60
    for at in counted.first_of_each_site():
        fail_tensor(at, expected)


#: Tokens that each request generates where pages are short: enough that one has to be put back.
LONG = 24


@pytest.fixture(scope="module")
def long_expected() -> Outcome:
    """The right answers of :data:`LONG` tokens."""
    outcome = run_requests(small_engine(), "expected", tokens=LONG)
    assert outcome.failed() == []
    return outcome


def count_pages(expected: Outcome) -> int:
    """Times that pages are taken in the crowded workload."""
    engine = crowded_engine()
    with pytest.MonkeyPatch.context() as patch:
        counter = FailingTake()
        patch.setattr(Tier, "take", counter)
        outcome = run_requests(engine, "counted", tokens=LONG)
    assert outcome.failed() == []
    outcome.check_others(expected)
    assert engine.stats().preemptions > 0
    return counter.calls


def fail_pages(at: int, error: Exception, expected: Outcome) -> list[int]:
    """Run the crowded workload with one take that fails, then once more without; the requests that failed."""
    engine = crowded_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tier, "take", FailingTake(at, error))
        outcome = run_requests(engine, "first", tokens=LONG)
    outcome.check_others(expected)
    again = run_requests(engine, "again", tokens=LONG)
    assert again.failed() == []
    again.check_others(expected)
    return outcome.failed()


def test_pages_may_run_out_at_any_time(long_expected: Outcome) -> None:
    """Then a request waits, or is put back; only one that finds no page with nothing else running is told."""
    for at in range(count_pages(long_expected)):
        assert len(fail_pages(at, PoolExhausted("injected"), long_expected)) <= 1


def test_taking_pages_may_fail_at_any_time(long_expected: Outcome) -> None:
    """Then the one request that they were for fails."""
    for at in range(count_pages(long_expected)):
        assert len(fail_pages(at, MemoryError("injected"), long_expected)) == 1
