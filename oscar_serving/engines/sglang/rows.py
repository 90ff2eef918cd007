"""Which window pages a request of SGLang has: a ring of its own, and a sink that prefix hits share.

Pure bookkeeping on the host. A request of the stock pool has a row number for as long as it runs; its recent tokens
lie in the row's ring. The unquantized first tokens lie in a *sink*, which outlives its request: a later request whose
cached prefix begins with the same tokens reads the same sink instead of INT2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

SinkKey = tuple[str, tuple[int, ...]]


class RowError(RuntimeError):
    """The bookkeeping was used in an order that would mix up two requests' tokens."""


@dataclass
class RowState:
    """A running request: its sink (0 for none), whether it writes it, and where its ring begins to be valid."""

    sink: int
    writes: bool
    valid_from: int


class Rows:
    """Rows ``1 … rows`` and sinks ``1 … rows + spare``.

    Parameters
    ----------
    rows
        Requests that run at most at once.
    sink
        Tokens of a sink; 0 for none.
    spare
        Sinks beyond one a row, which keep those of cached prefixes whose requests have ended.
    """

    def __init__(self, rows: int, sink: int, spare: int) -> None:
        self.rows, self.sink = rows, sink
        self.sinks = rows + spare if sink else 0
        self.open_rows: dict[int, RowState] = {}
        self.published: OrderedDict[SinkKey, int] = OrderedDict()
        self.shared = 0
        self.lost = 0
        self._key_of: dict[int, SinkKey] = {}
        self._free = list(range(self.sinks, 0, -1))
        self._references = [0] * (self.sinks + 1)
        self._dirty: dict[int, RowState] = {}

    def open(self, row: int, prefix: int, tokens: Sequence[int], salt: str = "") -> None:
        """A request takes ``row``; its first ``prefix`` tokens come from the prefix cache."""
        if not 1 <= row <= self.rows:
            raise RowError(f"row {row}: allowed are 1 to {self.rows}")
        if row in self.open_rows:
            raise RowError(f"row {row} is in use")
        sink, writes = 0, False
        if self.sink and prefix == 0:
            sink, writes = self._take(), True
        elif self.sink:
            key = (salt, tuple(tokens[: self.sink]))
            sink = self.published.get(key, 0)
            if sink:
                self.published.move_to_end(key)
                self.shared += 1
            else:
                self.lost += 1
        self._references[sink] += 1
        self.open_rows[row] = self._dirty[row] = RowState(sink, writes, prefix)

    def publish(self, row: int, tokens: Sequence[int], salt: str = "") -> None:
        """The row's ``tokens`` are written and about to enter the prefix cache."""
        state = self.open_rows[row]
        if not state.writes or len(tokens) < self.sink:
            return
        key = (salt, tuple(tokens[: self.sink]))
        if key not in self.published and state.sink not in self._key_of:
            self.published[key], self._key_of[state.sink] = state.sink, key

    def close(self, row: int) -> None:
        """The request leaves its row; a published sink stays until its place is needed."""
        state = self.open_rows.pop(row, None)
        if state is None:
            raise RowError(f"row {row} is not in use")
        self._dirty.pop(row, None)
        self._references[state.sink] -= 1
        if state.sink and not self._references[state.sink] and state.sink not in self._key_of:
            self._free.append(state.sink)

    def clear(self) -> None:
        """Every request is gone."""
        for row in list(self.open_rows):
            self.close(row)

    def forget(self) -> None:
        """The prefix cache was emptied: no sink is shared any more."""
        for sink in self.published.values():
            if not self._references[sink]:
                self._free.append(sink)
        self.published.clear()
        self._key_of.clear()

    def take_changes(self) -> dict[int, RowState]:
        """Rows opened since the last call, for the device's copy."""
        changes, self._dirty = self._dirty, {}
        return changes

    def _take(self) -> int:
        if not self._free:
            key = next((k for k, s in self.published.items() if not self._references[s]), None)
            if key is None:
                raise RowError("more sinks in use than rows")
            sink = self.published.pop(key)
            del self._key_of[sink]
            self._free.append(sink)
        return self._free.pop()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every sink is free, published or used, and counted right."""
        used = [s.sink for s in self.open_rows.values() if s.sink]
        published = list(self.published.values())
        assert self._key_of == {s: k for k, s in self.published.items()}, "a sink is published twice"
        assert not set(self._free) & (set(used) | set(published)), "a free sink is in use"
        assert len(set(self._free)) == len(self._free), "a sink is free twice"
        assert set(self._free) | set(used) | set(published) == set(range(1, self.sinks + 1)), "a sink is lost"
        for sink in range(1, self.sinks + 1):
            assert self._references[sink] == used.count(sink), f"sink {sink}: wrong count"
        writers = [s.sink for s in self.open_rows.values() if s.writes]
        assert len(set(writers)) == len(writers), "two requests write one sink"
