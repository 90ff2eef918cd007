"""A layer's stores and attention against the float64 reference: in PyTorch, and the kernels under the interpreter."""

from __future__ import annotations

import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oscar_serving.attention import AttentionSpec
from oscar_serving.attention.history import plan_groups
from oscar_serving.attention.reference import reference_attention
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.engines.vllm.flash import TorchFlash
from oscar_serving.engines.vllm.layer import CachedLayer
from oscar_serving.engines.vllm.options import INT2_BLOCK, WINDOW_BLOCK
from oscar_serving.engines.vllm.scratch import LayerShape, Scratch
from oscar_serving.rotation import LayerTransform
from tests.maps import apart

HEADS, RATIO = 2, 2


def transform(d: int, *, means: bool, fp8: bool) -> LayerTransform:
    base = LayerTransform.plain(HEADS, d, shrink=0.9)
    k_map, q_map = apart(base.k_rotation)
    g = torch.Generator().manual_seed(3)
    mean = {"k_mean": torch.randn(HEADS, d, generator=g), "v_mean": torch.randn(HEADS, d, generator=g)} if means else {}
    unit = {"k_unit": torch.tensor([0.01, 0.02]), "v_unit": torch.tensor([0.03, 0.01])} if fp8 else {}
    return LayerTransform(**{**vars(base), "k_rotation": k_map, "q_rotation": q_map, **mean, **unit})


class Rig:
    """One layer with stores for a few requests, filled as vLLM fills them."""

    def __init__(
        self, d: int, config: OscarConfig, lengths: list[int], *, means: bool = False, softcap: float | None = None,
        sinks: bool = False, kernels: bool = False, missing: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.config, self.d, self.lengths = config, d, lengths
        self.transform = transform(d, means=means, fp8=config.scale_dtype == "float8_e4m3")
        self.spec = AttentionSpec(d**-0.5, softcap)
        self.sinks = torch.randn(HEADS * RATIO) if sinks else None
        layout = PageLayout(d, config)
        torch.set_default_dtype(torch.bfloat16)  # as vLLM builds the layers of a bfloat16 model
        try:
            self.layer = CachedLayer(nn.Module(), layout, self.transform, self.spec, self.sinks)
        finally:
            torch.set_default_dtype(torch.float32)
        self.layer.portable = not kernels
        self.layer.flash = TorchFlash()
        pages = sum(-(-n // INT2_BLOCK) for n in lengths) + 1
        windows = sum(-(-n // WINDOW_BLOCK) for n in lengths) + 1
        # Blocks lie in a wider pool, as when layers lie side by side.
        kv = torch.zeros(pages, 2 * HEADS, INT2_BLOCK, layout.head_bytes // INT2_BLOCK, dtype=torch.uint8)[:, :HEADS]
        self.layer.bind(kv, torch.zeros(windows, 2, HEADS, WINDOW_BLOCK, d, dtype=torch.bfloat16))
        self.page_table, self.window_table = (
            torch.zeros(len(lengths), max(-(-n // size) for n in lengths) + 3, dtype=torch.int32)
            for size in (INT2_BLOCK, WINDOW_BLOCK)
        )
        g = torch.Generator().manual_seed(5)
        for table, size, count in ((self.page_table, INT2_BLOCK, pages), (self.window_table, WINDOW_BLOCK, windows)):
            ids = (torch.randperm(count - 1, generator=g) + 1).tolist()
            for r, n in enumerate(lengths):
                for b in range(-(-n // size)):
                    table[r, b] = ids.pop()
        if missing:
            # Of the sink, only blocks of earlier steps may be missing (a soft hit).
            self.window_table[:, 2::3] = 0
            self.window_table[1:, 1] = 0
        shape = [sum(lengths), HEADS, d]
        self.k = (torch.randn(shape, generator=g) * 2).bfloat16()
        self.v = torch.randn(shape, generator=g).bfloat16()
        self.q = torch.randn(sum(lengths), HEADS * RATIO, d, generator=g).bfloat16()
        self.offset = torch.tensor([0, *lengths]).cumsum(0).tolist()

    def rows(self, r: int, start: int, stop: int) -> slice:
        return slice(self.offset[r] + start, self.offset[r] + stop)

    def store(self, r: int, start: int, stop: int) -> None:
        position = torch.arange(start, stop)
        slots = [
            torch.where(block > 0, block.long() * size + position % size, -1)
            for table, size in ((self.page_table, INT2_BLOCK), (self.window_table, WINDOW_BLOCK))
            for block in (table[r, position // size],)
        ]
        rows = self.rows(r, start, stop)
        self.layer.store(self.k[rows], self.v[rows], *slots)

    def present(self, r: int, tokens: int) -> Tensor:
        return self.window_table[r, torch.arange(tokens) // WINDOW_BLOCK] != 0

    def expected(self, r: int, start: int, stop: int, chunk_start: int | None, present: Tensor) -> Tensor:
        """Reference with this step's tokens unquantized where the rule says so, whatever their window entry."""
        return reference_attention(
            self.q[self.rows(r, start, stop)].float(), self.k[self.rows(r, 0, stop)].float(),
            self.v[self.rows(r, 0, stop)].float(), transform=self.transform, config=self.config, spec=self.spec,
            chunk_start=chunk_start, window_present=present, sink_logits=self.sinks,
        ).output  # fmt: skip

    def scratch(self) -> Scratch:
        shape = self.shape()
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=len(self.lengths), max_num_batched_tokens=256),
            model_config=SimpleNamespace(max_model_len=max(self.lengths), dtype=torch.bfloat16),
        )
        scratch = Scratch.reserve([shape], config, 4, self.config.recent, torch.device("cpu"))
        scratch.rows = 2 * max(self.config.recent, 256)  # small, so that there are several tiles and groups
        return scratch

    def shape(self) -> LayerShape:
        layout = self.layer.layout
        return LayerShape(HEADS * RATIO, HEADS, self.d, self.config.k_bits, self.config.v_bits, layout.groups)

    def prefill(self, chunks: list[tuple[int, int]]) -> list[Tensor]:
        """Output of a step with tokens ``start … stop`` of each request."""
        sizes = [stop - start for start, stop in chunks]
        query_start = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        context = torch.tensor([start for start, _ in chunks], dtype=torch.int32)
        rows = torch.cat([torch.arange(*self.rows(r, *c).indices(10**9)[:2]) for r, c in enumerate(chunks)])
        scratch = self.scratch()
        groups = plan_groups(
            query_start, context, sizes, context.tolist(), recent=self.config.recent,
            rule=self.config.prefill_mode == "rule", rows=scratch.rows,
        )  # fmt: skip
        prefill = SimpleNamespace(
            first=0, query_start=query_start, lengths=context + torch.tensor(sizes, dtype=torch.int32),
            longest_query=max(sizes), groups=groups,
        )  # fmt: skip
        step: Any = SimpleNamespace(block_table=self.page_table, scratch=scratch)
        out = torch.empty_like(self.q[rows])
        self.layer.prefill(self.q[rows], self.k[rows], self.v[rows], step, prefill, self.window_table, out)
        return list(out.split(sizes))

    def decode(self, queries: list[int]) -> list[Tensor]:
        """Output of the last ``queries[r]`` tokens of each request."""
        rows = torch.cat([torch.arange(self.offset[r + 1] - n, self.offset[r + 1]) for r, n in enumerate(queries)])
        step: Any = SimpleNamespace(
            num_decodes=len(queries), max_decode_query=max(queries), block_table=self.page_table,
            query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
            lengths=torch.tensor(self.lengths, dtype=torch.int32), scratch=self.scratch(),
        )  # fmt: skip
        out = torch.empty_like(self.q[rows])
        self.layer.decode(self.q[rows], step, self.window_table, out, self.shape())
        return list(out.split(queries))


def config(**options: Any) -> OscarConfig:
    return OscarConfig(**{"page_size": INT2_BLOCK, "sink": 20, "recent": 40, **options})


PATHS = [
    pytest.param(False, id="torch"),
    pytest.param(
        True,
        id="kernels",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    ),
]
CASES = {
    "int2": {},
    "k4v2 fp8": {"k_bits": 4, "scale_dtype": "float8_e4m3"},
    "means": {"means": True},
    "softcap, means": {"means": True, "softcap": 20.0},
    "sinks, means": {"means": True, "sinks": True},
    "windows missing": {"missing": True},
    "groups": {"group_size": 32},
}


def rig(case: str, kernels: bool, mode: str, lengths: list[int], d: int = 64) -> Rig:
    options = dict(CASES[case])
    extra = {k: options.pop(k) for k in ("means", "softcap", "sinks", "missing") if k in options}
    return Rig(d, config(prefill_mode=mode, **options), lengths, kernels=kernels, **extra)


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["raw", "rule"])
def test_prefill_in_chunks(case: str, kernels: bool, mode: str) -> None:
    """Three requests in different states in one step: first chunk, short context, long context."""
    box = rig(case, kernels, mode, [70, 130, 400])
    chunks = [(0, 70), (25, 130), (310, 400)]
    for r, (start, stop) in enumerate(chunks):
        if start:
            box.store(r, 0, start)
        box.store(r, start, stop)
    for r, ((start, stop), out) in enumerate(zip(chunks, box.prefill(chunks), strict=True)):
        present = box.present(r, stop) | (torch.arange(stop) >= start)
        expected = box.expected(r, start, stop, start if mode == "raw" else None, present)
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_decode_with_drafts(case: str, kernels: bool) -> None:
    box = rig(case, kernels, "raw", [37, 130, 300])
    queries = [1, 4, 2]
    for r, n in enumerate(box.lengths):
        box.store(r, 0, n)
    for r, (n, out) in enumerate(zip(queries, box.decode(queries), strict=True)):
        stop = box.lengths[r]
        expected = box.expected(r, stop - n, stop, None, box.present(r, stop))
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("kernels", PATHS)
def test_mode_rule_does_not_depend_on_chunks(kernels: bool) -> None:
    outputs = []
    for cuts in ([0, 300], [0, 100, 300], [0, 16, 17, 230, 300]):
        box = rig("int2", kernels, "rule", [300])
        parts = []
        for start, stop in pairwise(cuts):
            box.store(0, start, stop)
            parts += box.prefill([(start, stop)])
        outputs.append(torch.cat(parts).float())
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(outputs[2], outputs[0], atol=2e-2, rtol=2e-2)


def test_groups_cover_every_request_and_fit_the_scratch() -> None:
    queries, context = [3, 1, 200, 7, 64], [1000, 0, 5000, 39, 41]
    start = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    for rule in (False, True):
        groups = plan_groups(
            start, torch.tensor(context, dtype=torch.int32), queries, context, recent=40, rule=rule, rows=160
        )
        assert [g.requests.start for g in groups] == [0, 2, 4]
        for group in groups:
            some = range(group.requests.start, group.requests.stop)
            assert group.tokens == slice(int(start[some[0]]), int(start[some[-1] + 1]))
            for stretch in (group.near, *group.distant):
                assert int(stretch.rows[-1]) <= 160
                assert int((stretch.rows[1:] - stretch.rows[:-1]).max()) <= max(stretch.longest, 0)
            covered = sum(int(s.rows[-1]) for s in (group.near, *group.distant))
            assert covered == sum(context[r] for r in some)
