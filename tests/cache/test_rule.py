"""Window page arithmetic against the position rule, position by position."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.cache.rule import reads_window, window_pages, window_start

POLICY = {"sink": st.integers(0, 100), "recent": st.integers(1, 100)}


@settings(deadline=None, max_examples=300)
@given(length=st.integers(0, 300), page_size=st.sampled_from([16, 32, 48]), **POLICY)
def test_pages_kept_are_those_that_are_read(length: int, page_size: int, sink: int, recent: int) -> None:
    kept_sink, kept_recent = window_pages(length, sink=sink, recent=recent, page_size=page_size)
    assert kept_sink.stop <= kept_recent.start or not kept_recent
    kept = {*kept_sink, *kept_recent}
    boundary = length // page_size * page_size

    def read(query: int) -> set[int]:
        return {key // page_size for key in range(query) if reads_window(key, query, sink=sink, recent=recent)}

    # What the next query reads, and what a query would read at the last page boundary.
    assert kept >= read(length) | read(boundary)
    # Besides, only the page that is being filled.
    assert kept <= read(length) | read(boundary) | {length // page_size}
    assert len(kept) <= -(-sink // page_size) + -(-recent // page_size) + 1


@settings(deadline=None, max_examples=100)
@given(length=st.integers(0, 300), page_size=st.sampled_from([16, 32]), more=st.integers(1, 100), **POLICY)
def test_a_page_that_left_is_never_read_again(length: int, page_size: int, more: int, sink: int, recent: int) -> None:
    now, later = (
        {page for part in window_pages(n, sink=sink, recent=recent, page_size=page_size) for page in part}
        for n in (length, length + more)
    )
    assert not {page for page in later - now if page * page_size < length}


@given(**POLICY)
def test_window_start(sink: int, recent: int) -> None:
    """The first position beyond the sink that a query reads unquantized."""
    for length in (0, 1, recent, recent + 1, 1000):
        read = [key for key in range(length) if reads_window(key, length, sink=0, recent=recent)]
        assert window_start(length, recent) == min(read, default=length)


def test_tensors_and_numbers_agree() -> None:
    key, query = torch.arange(40)[None, :], torch.arange(40)[:, None]
    table = reads_window(key, query, sink=4, recent=7)
    for q in range(40):
        assert table[q].tolist() == [reads_window(k, q, sink=4, recent=7) for k in range(40)]
    assert table.diagonal().all(), "a query reads itself unquantized"
