"""The backend of CUDA devices behind the attention seam, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscar_serving.attention import AttentionSpec, BatchTables, LayerCache, select_backend, triton_backend
from oscar_serving.attention.triton_backend import TritonBackend
from oscar_serving.config import OscarConfig
from tests.attention.cases import Case, World
from tests.kernels_triton.cache import DEVICE

SMALL = OscarConfig(sink=10, recent=20, page_size=16)
PLAIN = AttentionSpec(0.125)


class Moved:
    """The backend on :data:`DEVICE` for a cache that lies in host memory."""

    name = "moved"

    def __init__(self) -> None:
        self.backend = TritonBackend()

    def store(self, layer: LayerCache, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        there = self._layer(layer)
        self.backend.store(there, k.to(DEVICE), v.to(DEVICE), self._tables(tables))
        layer.pages.copy_(there.pages)
        layer.windows.copy_(there.windows)

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        q, k, v = (x.to(DEVICE) for x in (q, k, v))
        return self.backend.attend(self._layer(layer), q, k, v, self._tables(tables)).cpu()

    def _layer(self, layer: LayerCache) -> LayerCache:
        return replace(
            layer,
            pages=layer.pages.to(DEVICE),
            windows=layer.windows.to(DEVICE),
            transform=layer.transform.to(DEVICE),
        )

    def _tables(self, t: BatchTables) -> BatchTables:
        parts = (t.query_start, t.lengths, t.chunk_start, t.page_table, t.window_table)
        return BatchTables(*(x.to(DEVICE) for x in parts), t.host)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in a history of a hundred tokens."""
    monkeypatch.setattr(triton_backend, "KEY_TILE", 48)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


FP8 = SMALL.with_(k_bits=4, scale_dtype="float8_e4m3")
CASES = {
    "d 64": Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64),
    "softcap, FP8, K of 4 bits": Case(FP8, AttentionSpec(0.125, softcap=5.0), heads=1, ratio=2, head_dim=64),
    "sliding window": Case(SMALL, AttentionSpec(0.125, sliding_window=33), heads=1, ratio=2, head_dim=64),
    "d 80, no sink, groups": Case(SMALL.with_(sink=0, group_size=16), PLAIN, heads=1, ratio=1, head_dim=80),
}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("d 64", True),
        ("d 64", False),
        ("softcap, FP8, K of 4 bits", True),
        ("sliding window", False),
        ("d 80, no sink, groups", False),
    ],
)
def test_ragged_batches_equal_the_reference(name: str, raw: bool) -> None:
    """First chunks, chunks behind a history, decode and speculative steps together; windows freed as the pool would."""
    world, backend = World(CASES[name], [130, 50]), Moved()
    for counts in ([50, 2], [1, 40], [70, 1]):
        before = list(world.done)
        for b, out in enumerate(world.step(backend, counts, raw=raw)):
            if counts[b]:
                assert_close(out, world.expected(b, before[b], world.done[b], raw=raw and counts[b] > 1))
        world.keep_windows()


def test_rule_mode_does_not_depend_on_chunks() -> None:
    case, results = CASES["d 64"], []
    for chunks in ([130], [50, 50, 30], [120, 10]):
        world, outs = World(case, [130]), []
        for chunk in chunks:
            outs += world.step(Moved(), [chunk])
            world.keep_windows()
        results.append(torch.cat(outs))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    assert_close(results[0], World(case, [130]).expected(0, 0, 130))


@pytest.mark.parametrize("count", [1, 20])
def test_a_lost_window_page_is_read_from_int2(count: int) -> None:
    case = Case(OscarConfig(sink=32, recent=64, page_size=16), PLAIN, heads=1, ratio=2, head_dim=64)
    world = World(case, [100 + count])
    world.step(Moved(), [100])
    present = torch.ones(100 + count, dtype=torch.bool)
    for page in (1, 3, 5):  # sink, history, recent
        world.free_window(0, page)
        present[page * 16 : page * 16 + 16] = False
    assert_close(world.step(Moved(), [count])[0], world.expected(0, 100, 100 + count, present=present))


def test_new_tokens_without_a_window_page() -> None:
    """The middle of a long chunk has no window pages; its queries read it unquantized all the same."""
    for length in (16, 100):
        world = World(Case(OscarConfig(sink=4, recent=8, page_size=16), PLAIN, heads=1, ratio=2, head_dim=64), [length])
        for page in range(length // 16):
            world.free_window(0, page)
        assert_close(world.step(Moved(), [length])[0], world.expected(0, 0, length))
        used = [p for p in range(world.layer.windows.shape[0]) if p not in world.tables[0].windows or p == 0]
        assert all(torch.isnan(world.layer.windows[p]).all() for p in used)


def test_tokens_without_a_page_are_not_written() -> None:
    world = World(Case(SMALL, PLAIN, heads=1, ratio=1, head_dim=64), [40])
    world.tables[0].pages[1] = 0
    world.tables[0].windows[0] = 0
    pages = world.layer.pages.clone()
    _, k, v = world.data[0]
    Moved().store(world.layer, k, v, world.batch([40]))
    assert torch.isnan(world.layer.windows[0]).all()
    changed = (world.layer.pages != pages).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(p for p in world.tables[0].pages if p)


def test_the_plain_cache_is_ordinary_attention() -> None:
    """No INT2 tier: softmax attention over K and V as they are."""
    world = World(Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64), [100, 30])
    world.layer = LayerCache.allocate_plain(2, 64, PLAIN, window_pages=12, page_size=16)
    for b in range(2):
        world.data[b] = tuple(x.bfloat16().float() for x in world.data[b])  # type: ignore[call-overload]
    for counts in ([60, 29], [1, 1]):
        before = list(world.done)
        for b, out in enumerate(world.step(Moved(), counts)):
            q, k, v = world.data[b]
            stop = world.done[b]
            mask = torch.arange(stop) <= torch.arange(before[b], stop)[:, None]
            q, k, v = (x.double().transpose(0, 1) for x in (q[before[b] : stop], k[:stop], v[:stop]))
            k, v = (x.repeat_interleave(3, 0) for x in (k, v))
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125)
            assert_close(out, want.transpose(0, 1))


def test_bfloat16_models() -> None:
    """Views with odd strides; rotations in two parts; the output has the model's type."""
    world = World(Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64), [60])
    world.data = [tuple(x.bfloat16().float() for x in world.data[0])]  # type: ignore[list-item]
    q, k, v = (x.bfloat16().transpose(0, 1).contiguous().transpose(0, 1) for x in world.data[0])
    for start, stop in ((0, 59), (59, 60)):
        tables = world.batch([stop - start])
        Moved().store(world.layer, k[start:stop], v[start:stop], tables)
        out = Moved().attend(world.layer, q[start:stop], k[start:stop], v[start:stop], tables)
        world.done = [stop]
        assert out.dtype == torch.bfloat16
        assert_close(out, world.expected(0, start, stop))


def test_raw_keys_must_be_of_this_step() -> None:
    world = World(Case(SMALL, PLAIN, 1, 1, 64), [40])
    world.run(Moved(), 0, [20])
    q, k, v = (x[20:40] for x in world.data[0])
    tables = world.batch([20])
    tables.host[2][0] = 10
    with pytest.raises(ValueError, match="chunk_start=10"):
        Moved().attend(world.layer, q, k, v, tables)


def test_cuda_devices_take_this_backend() -> None:
    assert select_backend("cuda").name == "triton"
