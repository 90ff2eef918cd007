"""Which window pages a request has: bookkeeping of rows and sinks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oscar_serving.engines.sglang.rows import RowError, Rows

SINK = 4
PROMPTS = [[t] * 3 + list(range(8)) for t in range(4)] + [[1], [2, 2]]


def test_a_hit_reads_the_sink_that_the_first_request_wrote() -> None:
    rows = Rows(2, SINK, 1)
    rows.open(1, 0, PROMPTS[0])
    rows.publish(1, PROMPTS[0])
    first = rows.open_rows[1].sink
    rows.close(1)
    rows.open(2, 4, PROMPTS[0])
    assert (rows.open_rows[2].sink, rows.open_rows[2].writes, rows.open_rows[2].valid_from) == (first, False, 4)


def test_a_hit_with_another_salt_or_other_tokens_reads_no_sink() -> None:
    rows = Rows(3, SINK, 1)
    rows.open(1, 0, PROMPTS[0], "a")
    rows.publish(1, PROMPTS[0], "a")
    rows.open(2, 4, PROMPTS[0], "b")
    rows.open(3, 4, PROMPTS[1], "a")
    assert rows.open_rows[2].sink == rows.open_rows[3].sink == 0
    assert rows.lost == 2


def test_a_sink_in_use_is_never_taken() -> None:
    rows = Rows(2, SINK, 0)
    rows.open(1, 0, PROMPTS[0])
    rows.publish(1, PROMPTS[0])
    rows.close(1)
    rows.open(1, 4, PROMPTS[0])  # shares it
    shared = rows.open_rows[1].sink
    rows.open(2, 0, PROMPTS[1])
    assert rows.open_rows[2].sink != shared


def test_a_short_request_publishes_when_it_has_grown() -> None:
    rows = Rows(2, SINK, 1)
    rows.open(1, 0, [7])
    rows.publish(1, [7])
    assert not rows.published
    rows.publish(1, [7, 1, 2, 3, 4])
    rows.close(1)
    rows.open(1, 4, [7, 1, 2, 3, 9, 9])
    assert rows.open_rows[1].sink


@pytest.mark.parametrize("sink", [0, 4])
def test_misuse_is_an_error(sink: int) -> None:
    rows = Rows(1, sink, 0)
    with pytest.raises(RowError, match="allowed are 1 to 1"):
        rows.open(0, 0, [1])  # row 0 is SGLang's padding row
    rows.open(1, 0, [1])
    with pytest.raises(RowError, match="in use"):
        rows.open(1, 0, [1])
    rows.close(1)
    with pytest.raises(RowError, match="not in use"):
        rows.close(1)


class RowMachine(RuleBasedStateMachine):
    """Random open, publish, close and flush; a model of who wrote what decides what a hit may read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(3, SINK, 2)
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.running: dict[int, tuple[str, list[int]]] = {}

    @precondition(lambda self: len(self.running) < 3)
    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS), salt=st.sampled_from(["", "x"]), hit=st.booleans())
    def open(self, data: st.DataObject, prompt: list[int], salt: str, hit: bool) -> None:
        row = data.draw(st.sampled_from([r for r in (1, 2, 3) if r not in self.running]))
        hit = hit and len(prompt) > SINK
        self.rows.open(row, SINK if hit else 0, prompt, salt)
        self.running[row] = (salt, prompt)
        state = self.rows.open_rows[row]
        if hit and state.sink:
            assert self.written[state.sink] == (salt, tuple(prompt[:SINK])), "a hit reads another prompt's sink"
        if not hit:
            self.written.pop(state.sink, None)  # from now on it is this row's to overwrite

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        salt, prompt = self.running[row]
        state = self.rows.open_rows[row]
        if state.writes and len(prompt) >= SINK:
            self.written[state.sink] = (salt, tuple(prompt[:SINK]))
        self.rows.publish(row, prompt, salt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[row]
        self.rows.close(row)

    @rule()
    def flush(self) -> None:
        self.rows.forget()

    @invariant()
    def consistent(self) -> None:
        self.rows.check_integrity()


TestRowMachine = RowMachine.TestCase
TestRowMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_every_row_finds_a_sink(rows: int, spare: int) -> None:
    book = Rows(rows, SINK, spare)
    for turn in range(4):
        for row in range(1, rows + 1):
            book.open(row, 0, [turn, row, 3, 4, 5])
            book.publish(row, [turn, row, 3, 4, 5])
        book.check_integrity()
        for row in range(1, rows + 1):
            book.close(row)
