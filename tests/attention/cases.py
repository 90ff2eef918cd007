"""Sequences written to a cache chunk by chunk, as an engine would, beside what the reference says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oscar_serving.attention import AttentionBackend, AttentionSpec, BatchTables, LayerCache
from oscar_serving.attention.reference import reference_attention
from oscar_serving.cache.rule import window_start
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform, hadamard, spectral_rotation
from tests.maps import apart


@dataclass(frozen=True)
class Case:
    """One layer and how its cache is laid out."""

    config: OscarConfig
    spec: AttentionSpec
    heads: int
    ratio: int
    head_dim: int
    seed: int = 0
    exact: bool = True  # products of rotations and tokens are exact in float32, so no code is a matter of rounding

    def transform(self) -> LayerTransform:
        """Random rotations, means, clips and units."""
        g = torch.Generator().manual_seed(self.seed)
        shape = (self.heads, self.head_dim)
        if self.exact:
            exact = [_exact_rotation(self.head_dim, g) for _ in range(2 * self.heads)]
            k_rotation, v_rotation = torch.stack(exact).unflatten(0, (2, self.heads))
        else:
            a = torch.randn(2, *shape, self.head_dim, generator=g)
            k_rotation, v_rotation = spectral_rotation(a @ a.mT).float()
        k_rotation, q_rotation = apart(k_rotation)
        k_mean, v_mean = _coarse(torch.randn(2, *shape, generator=g))
        k_shrink, v_shrink = 0.6 + 0.4 * torch.rand(2, self.heads, generator=g)
        one = torch.ones(self.heads)
        fp8 = self.config.scale_dtype == "float8_e4m3"
        unit = 0.01 * (1 + torch.rand(2, self.heads, generator=g)) if fp8 else torch.stack([one, one])
        return LayerTransform(k_rotation, q_rotation, v_rotation, k_mean, v_mean, k_shrink, v_shrink, unit[0], unit[1])

    def cache(self, pages: int, window_pages: int) -> LayerCache:
        """An empty cache full of garbage that reads as NaN where it can, with gaps between heads and pages."""
        layout = PageLayout(self.head_dim, self.config)
        layer = LayerCache.allocate(layout, self.transform(), self.spec, pages=pages, window_pages=window_pages)
        store = torch.full((pages, self.heads + 1, layout.head_bytes + 48), 0xFF, dtype=torch.uint8)
        windows = torch.full((window_pages, 2, self.heads, self.config.page_size + 1, self.head_dim), torch.nan)
        windows = windows.to(layer.windows.dtype)[:, :, :, : self.config.page_size]
        return replace(layer, pages=store[:, : self.heads, : layout.head_bytes], windows=windows)

    def tokens(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[count, query heads, d]``, k, v ``[count, heads, d]``."""
        g = torch.Generator().manual_seed(1000 + seed)
        q = torch.randn(count, self.heads * self.ratio, self.head_dim, generator=g)
        k, v = torch.randn(2, count, self.heads, self.head_dim, generator=g) * 1.5
        k, v = _coarse(k + 0.5), _coarse(v - 0.5)
        return q, k, v


def _coarse(x: Tensor) -> Tensor:
    """Rounded to few bits."""
    return (x * 16).round() / 16


def _exact_rotation(d: int, g: torch.Generator) -> Tensor:
    """Hadamard matrices of four channels each, channels permuted, signs flipped: entries 0 and ±1/2."""
    matrix = torch.block_diag(*[hadamard(4).float()] * (d // 4))
    signs = torch.randint(2, (d,), generator=g) * 2.0 - 1
    return (matrix[torch.randperm(d, generator=g)] * signs)[:, torch.randperm(d, generator=g)].contiguous()


@dataclass
class Tables:
    """Page and window tables of one request; pages in a scattered order."""

    pages: list[int]
    windows: list[int]


class World:
    """A cache with the requests in it."""

    def __init__(self, case: Case, lengths: Sequence[int]) -> None:
        self.case = case
        size = case.config.page_size
        counts = [-(-n // size) for n in lengths]
        total = sum(counts)
        g = torch.Generator().manual_seed(case.seed + 7)
        order = (torch.randperm(total, generator=g) + 1).tolist()
        window_order = (torch.randperm(total, generator=g) + 1).tolist()
        self.layer = case.cache(total + 1, total + 1)
        self.tables: list[Tables] = []
        self.data = [case.tokens(n, seed) for seed, n in enumerate(lengths)]
        self.done = [0] * len(lengths)
        for count in counts:
            self.tables.append(Tables(order[:count], window_order[:count]))
            order, window_order = order[count:], window_order[count:]

    def free_window(self, request: int, page: int) -> None:
        """Take a page out of the window table and spoil what it held."""
        entry = self.tables[request].windows[page]
        if entry:
            self.layer.windows[entry] = torch.nan
            self.tables[request].windows[page] = 0

    def batch(self, counts: Sequence[int], *, raw: bool = False) -> BatchTables:
        """Tables for the next ``counts[b]`` tokens of each request."""
        starts, lengths = [0], []
        for b, count in enumerate(counts):
            starts.append(starts[-1] + count)
            lengths.append(self.done[b] + count)
        chunk_start = [self.done[b] if raw and count > 1 else lengths[b] for b, count in enumerate(counts)]
        size = self.case.config.page_size
        width = max(1, *(-(-n // size) for n in lengths))
        rows = [[t[:width] + [0] * (width - len(t)) for t in (x.pages, x.windows)] for x in self.tables]
        ints = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths, chunk_start)]
        pages, windows = torch.tensor(rows, dtype=torch.int32).unbind(1)
        return BatchTables(*ints, pages.contiguous(), windows.contiguous(), (starts, lengths, chunk_start))

    def step(self, backend: AttentionBackend, counts: Sequence[int], *, raw: bool = False) -> list[Tensor]:
        """Store and attend for the next tokens; outputs by request."""
        tables = self.batch(counts, raw=raw)
        parts = [[x[self.done[b] : self.done[b] + c] for x in self.data[b]] for b, c in enumerate(counts)]
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        backend.store(self.layer, k, v, tables)
        out = backend.attend(self.layer, q, k, v, tables)
        self.done = [d + c for d, c in zip(self.done, counts, strict=True)]
        return list(out.split(list(counts)))

    def keep_windows(self) -> None:
        """Free the window pages that no later query reads, as the pool does."""
        config, size = self.case.config, self.case.config.page_size
        for b, done in enumerate(self.done):
            start = window_start(done, config.recent)
            for page in range(-(-config.sink // size), start // size):
                self.free_window(b, page)

    def run(self, backend: AttentionBackend, request: int, chunks: Sequence[int], *, raw: bool = False) -> Tensor:
        """All steps of one request, alone in its batches."""
        outs = []
        for chunk in chunks:
            counts = [0] * len(self.tables)
            counts[request] = chunk
            outs.append(self.step(backend, counts, raw=raw)[request])
        return torch.cat(outs)

    def expected(
        self, request: int, start: int, stop: int, *, raw: bool = False, present: Tensor | None = None
    ) -> Tensor:
        """The reference's output for positions ``start … stop``, float64."""
        q, k, v = self.data[request]
        return reference_attention(
            q[start:stop],
            k[:stop],
            v[:stop],
            transform=self.layer.transform,
            config=self.case.config,
            spec=self.case.spec,
            chunk_start=start if raw else None,
            window_present=present,
        ).output
