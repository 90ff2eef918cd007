"""One layer over rows: store, chunked prefill, decode, prefix hits, held against the float64 reference."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from oscar_kernels.triton.rows import RowLayout
from oscar_serving.attention import AttentionSpec
from oscar_serving.attention.reference import reference_attention
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.engines.sglang.geometry import LayerShape, Scratch
from oscar_serving.engines.sglang.layer import OscarLayer
from oscar_serving.engines.sglang.options import PAGE
from oscar_serving.engines.sglang.rows import Rows
from oscar_serving.engines.sglang.step import empty_tables, fill_decode, prefill_step
from oscar_serving.engines.sglang.store import first_ring, ring_pages, sink_pages, window_pages
from oscar_serving.rotation import LayerTransform
from tests.maps import apart

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="needs TRITON_INTERPRET=1 or a GPU",
)

HEADS, QUERY_HEADS, D, RUNNING, LENGTH = 2, 4, 64, 3, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = AttentionSpec(D**-0.5)


class World:
    """A layer, rows, and a page allocator that hands out pages in a random order."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.config = OscarConfig(page_size=PAGE, **{"sink": 16, "recent": 48, **options})  # type: ignore[arg-type]
        layout = PageLayout(D, self.config)
        plain = LayerTransform.plain(HEADS, D)
        k_map, q_map = apart(plain.k_rotation)
        transform = replace(plain, k_rotation=k_map, q_rotation=q_map)
        transform.k_mean.normal_()
        transform.v_mean.normal_()
        self.transform = transform
        self.free = (torch.randperm(60) + 1).tolist()
        windows = torch.full((window_pages(self.config, RUNNING), 2, HEADS, 16, D), torch.nan, dtype=torch.bfloat16)
        pages = torch.randint(0, 256, (61, HEADS, layout.head_bytes), dtype=torch.uint8)
        self.layer = OscarLayer(layout, transform, pages.to(DEVICE), windows.to(DEVICE), torch.bfloat16)
        self.layer.windows.nan_to_num_(7.0)  # stale bytes of an earlier request, not zeros
        self.rows = Rows(RUNNING, self.config.sink, 2 if self.config.sink else 0)
        zeros = torch.zeros(RUNNING + 1, dtype=torch.int32, device=DEVICE)
        self.layout = RowLayout(
            zeros, zeros.clone(), zeros.clone(), sink_pages(self.config), ring_pages(self.config),
            first_ring(self.config, RUNNING),
        )  # fmt: skip
        self.req_to_token = torch.zeros(RUNNING + 1, LENGTH, dtype=torch.int32, device=DEVICE)
        self.shape = LayerShape(QUERY_HEADS, HEADS, D, self.config.k_bits, self.config.v_bits, layout.groups)
        self.scratch = Scratch.reserve([self.shape], RUNNING + 2, LENGTH, self.config.recent, torch.bfloat16, DEVICE)
        self.history: dict[int, list[torch.Tensor]] = {}

    def open(self, row: int, tokens: list[int], *, prefix: int = 0, donor: int = 0) -> None:
        self.rows.open(row, prefix, tokens)
        for r, s in self.rows.take_changes().items():
            self.layout.sink_page[r] = 1 + (s.sink - 1) * self.layout.sink_pages if s.sink else 0
            self.layout.sink_write[r], self.layout.valid_from[r] = int(s.writes), s.valid_from
        k, v = torch.randn(2, LENGTH, HEADS, D).to(torch.bfloat16)
        k[:, :, 3] *= 8  # an outlier channel
        if donor:
            self.req_to_token[row, :prefix] = self.req_to_token[donor, :prefix]
            for mine, theirs in zip((k, v), self.history[donor], strict=True):
                mine[:prefix] = theirs[:prefix]
        self.history[row] = [k, v]

    def slots(self, row: int, start: int, stop: int) -> list[int]:
        for position in range(start, stop):
            if position % PAGE == 0:
                self.req_to_token[row, position] = self.free.pop() * PAGE
            else:
                self.req_to_token[row, position] = self.req_to_token[row, position - 1] + 1
        return self.req_to_token[row, start:stop].tolist()

    def prefill(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        """Requests (row, start, stop) of one step; returns queries' outputs and checks them."""
        q = torch.randn(sum(b - a for _, a, b in parts), QUERY_HEADS, D).to(torch.bfloat16)
        k, v = (torch.cat([self.history[r][i][a:b] for r, a, b in parts]) for i in (0, 1))
        slots = torch.tensor([s for r, a, b in parts for s in self.slots(r, a, b)], device=DEVICE)
        step = prefill_step(
            self.layout, self.req_to_token, torch.tensor([r for r, _, _ in parts], device=DEVICE),
            [b - a for _, a, b in parts], [a for _, a, _ in parts], slots, self.config, self.scratch.rows,
        )  # fmt: skip
        out = torch.empty_like(q, device=DEVICE)
        self.layer.prefill(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), step, out, SPEC, self.scratch)
        at = 0
        for row, start, stop in parts:
            n = stop - start
            raw = start if self.config.prefill_mode == "raw" else None
            self.check(row, q[at : at + n], out[at : at + n].cpu(), stop, raw)
            at += n
        return out

    def decode(self, lengths: dict[int, int], padding: int = 0) -> None:
        """One more token for each row; ``padding`` requests as a captured graph has them."""
        q = torch.randn(len(lengths) + padding, QUERY_HEADS, D).to(torch.bfloat16)
        slots = [self.slots(r, n, n + 1)[0] for r, n in lengths.items()] + [0] * padding
        rows = torch.tensor([*lengths, *[0] * padding], device=DEVICE)
        total = torch.tensor([*(n + 1 for n in lengths.values()), *[1] * padding], device=DEVICE)
        k, v = (torch.stack([self.history[r][i][n] for r, n in lengths.items()]) for i in (0, 1))
        k, v = (torch.cat([x, torch.full((padding, HEADS, D), 99.0, dtype=x.dtype)]).to(DEVICE) for x in (k, v))
        step = empty_tables(len(rows), LENGTH, DEVICE)
        fill_decode(self.layout, self.req_to_token, rows, total, torch.tensor(slots, device=DEVICE), step)
        null = self.layer.pages[0].clone(), self.layer.windows[0].clone()
        self.layer.store(k, v, step.slots, step.window_slots)
        assert torch.equal(null[0], self.layer.pages[0]), "padding wrote a page"
        assert torch.equal(null[1], self.layer.windows[0]), "padding wrote a window"
        out = torch.empty_like(q, device=DEVICE)
        query_start = torch.arange(len(rows) + 1, dtype=torch.int32, device=DEVICE)
        self.layer.decode(q.to(DEVICE), step, query_start, out, SPEC, self.shape, self.scratch)
        for i, (row, n) in enumerate(lengths.items()):
            self.check(row, q[i : i + 1], out[i : i + 1].cpu(), n + 1, None)

    def check(self, row: int, q: torch.Tensor, out: torch.Tensor, length: int, chunk_start: int | None) -> None:
        k, v = (x[:length] for x in self.history[row])
        state = self.rows.open_rows[row]
        position = torch.arange(length)
        present = (position >= state.valid_from) & (position >= self.config.sink)
        if state.sink:
            present |= position < self.config.sink
        wanted = reference_attention(
            q, k, v, transform=self.transform, config=self.config, spec=SPEC, chunk_start=chunk_start,
            window_present=present,
        ).output  # fmt: skip
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < 0.01, f"row {row}, {length} tokens: {error:.4f}"


@pytest.mark.parametrize(("mode", "sink", "k_bits"), [("raw", 16, 2), ("rule", 16, 2), ("raw", 0, 4), ("rule", 20, 2)])
def test_chunks_and_decode(mode: str, sink: int, k_bits: int) -> None:
    world = World(prefill_mode=mode, sink=sink, k_bits=k_bits)
    world.open(1, list(range(300)))
    world.open(2, [7] * 300)
    world.prefill((1, 0, 70), (2, 0, 9))  # a chunk longer than the ring of 64 positions, and one shorter than the sink
    world.prefill((1, 70, 200), (2, 9, 30))
    world.decode({1: 200, 2: 30}, padding=2)
    world.prefill((1, 201, 203))
    world.decode({2: 31, 1: 203})


@pytest.mark.parametrize("mode", ["raw", "rule"])
def test_a_hit_reads_the_shared_sink_and_int2_before_its_own_tokens(mode: str) -> None:
    world = World(prefill_mode=mode)
    tokens = list(range(300))
    world.open(1, tokens)
    world.prefill((1, 0, 150))
    world.rows.publish(1, tokens[:150])
    world.open(2, tokens, prefix=64, donor=1)
    assert world.rows.open_rows[2].sink == world.rows.open_rows[1].sink
    world.prefill((2, 64, 130))
    world.decode({1: 150, 2: 130})


def test_a_hit_whose_sink_is_gone_reads_int2_there() -> None:
    world = World()
    world.open(1, [1] * 300)
    world.prefill((1, 0, 150))
    world.open(2, [1] * 300, prefix=64, donor=1)  # nothing was published
    assert world.rows.open_rows[2].sink == 0
    world.prefill((2, 64, 120))
    world.decode({2: 120})


def test_first_tokens_without_a_sink_are_not_read_from_a_ring_that_has_moved_on() -> None:
    world = World(sink=128)
    world.open(1, [1] * 300)
    world.prefill((1, 0, 150))
    world.open(2, [1] * 300, prefix=64, donor=1)
    assert world.rows.open_rows[2].sink == 0
    world.prefill((2, 64, 240))  # tokens 64 … 127 were in the ring once
    world.decode({2: 240})


def test_a_row_that_is_used_again_shows_nothing_of_the_request_before() -> None:
    world = World()
    world.open(1, [1] * 300)
    world.prefill((1, 0, 140))
    world.decode({1: 140})
    world.rows.close(1)
    world.open(3, [2] * 300)
    world.prefill((3, 0, 70))
    world.open(1, [2] * 300, prefix=64, donor=3)
    world.prefill((1, 64, 80))
    world.decode({1: 80, 3: 70})
