"""Allocations that fail: of tensors anywhere below torch's dispatcher, and of pages in the pool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_serving.cache.tier import Tier


class Site(NamedTuple):
    """A place in the code that allocates: operator, file and line of the innermost frame outside of torch."""

    operator: str
    file: str
    line: int


class Allocations(TorchDispatchMode):
    """Within, tensor allocations are counted; number ``at`` (from 0) raises ``torch.OutOfMemoryError`` instead.

    Attributes
    ----------
    sites
        Where each allocation was, in order.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _allocates(func):
            number = len(self.sites)
            self.sites.append(_site(str(func)))
            if number == self._at:
                raise torch.OutOfMemoryError(f"injected at {self.sites[-1]}")
        return func(*args, **kwargs or {})

    def first_of_each_site(self) -> list[int]:
        """Number of the first allocation of each site."""
        first: dict[Site, int] = {}
        for number, site in enumerate(self.sites):
            first.setdefault(site, number)
        return list(first.values())


def _allocates(func: Any) -> bool:
    """Whether an operator returns a tensor that is no view of, and not written into, one of its arguments."""
    if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...)
        return True
    return any(str(value.type) == "Tensor" and value.alias_info is None for value in func._schema.returns)


def _site(operator: str) -> Site:
    frame = sys._getframe(2)
    while frame.f_back is not None and "torch" in frame.f_code.co_filename.split("site-packages")[-1]:
        frame = frame.f_back
    return Site(operator, frame.f_code.co_filename, frame.f_lineno)


class FailingTake:
    """Stands in for :meth:`Tier.take`: call number ``at`` (from 0) raises ``error`` instead."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        self._take: Callable[[Tier, int], list[int]] = Tier.take
        self._at, self._error = at, error
        self.calls = 0

    def __get__(self, tier: Tier, owner: type) -> Callable[[int], list[int]]:
        def take(count: int) -> list[int]:
            number, self.calls = self.calls, self.calls + 1
            if number == self._at:
                assert self._error is not None
                raise self._error
            return self._take(tier, count)

        return take
