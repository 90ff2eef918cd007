"""Every backend against the float64 reference: tiers, chunks, batches, tables."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_serving.attention import AttentionBackend, AttentionSpec, LayerCache, select_backend
from oscar_serving.attention.cpu_backend import CpuBackend
from oscar_serving.attention.torch_backend import TorchBackend
from oscar_serving.codec import PageLayout
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.rotation import LayerTransform

from .cases import Case, World

BACKENDS = [TorchBackend(), CpuBackend()]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
SMALL = OscarConfig(sink=10, recent=20, page_size=16)
PLAIN = AttentionSpec(0.2)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """Within ``tolerance`` of values of order one; NaN is never close."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_dim = draw(st.sampled_from([16, 64, 80, 96, 128, 192, 256]))
    group = draw(st.sampled_from([None, None, 8, 16, 32, 40, 64]))
    config = OscarConfig(
        k_bits=draw(st.sampled_from([2, 4])),
        v_bits=draw(st.sampled_from([2, 4])),
        group_size=group if group and head_dim % group == 0 else None,
        sink=draw(st.sampled_from([0, 1, 10, 16, 40])),
        recent=draw(st.sampled_from([1, 2, 16, 20, 64])),
        page_size=draw(st.sampled_from([16, 32, 48])),
        scale_dtype=draw(st.sampled_from(["float16", "float8_e4m3"])),
        window_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
    spec = AttentionSpec(
        scale=head_dim**-0.5,
        softcap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        sliding_window=draw(st.sampled_from([None, None, 1, 17, 60])),
    )
    ratio = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]))
    return Case(config, spec, draw(st.integers(1, 3)), ratio, head_dim, seed=draw(st.integers(0, 99)))


def chunks_of(draw: st.DrawFn, length: int) -> list[int]:
    """``length`` cut into chunks, mostly decode steps and a few long ones."""
    chunks: list[int] = []
    while sum(chunks) < length:
        left = length - sum(chunks)
        chunks.append(min(left, draw(st.sampled_from([1, 1, 2, 7, 16, 17, 50, left]))))
    return chunks


@each_backend
@settings(max_examples=25, deadline=None)
@given(case=cases(), data=st.data())
def test_ragged_batches_equal_the_reference(backend: AttentionBackend, case: Case, data: st.DataObject) -> None:
    """Requests of different length prefilled and decoded together, window pages freed as the pool would."""
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 130), min_size=1, max_size=3))
    raw = draw(st.booleans())
    world = World(case, lengths)
    queues = [chunks_of(draw, n) for n in lengths]
    while any(queues):
        counts = [queue.pop(0) if queue else 0 for queue in queues]
        before = list(world.done)
        for b, out in enumerate(world.step(backend, counts, raw=raw)):
            if counts[b]:
                as_raw = raw and counts[b] > 1
                assert_close(out, world.expected(b, before[b], world.done[b], raw=as_raw))
        world.keep_windows()


@each_backend
@pytest.mark.parametrize("recent", [1, 20, 300])
@pytest.mark.parametrize("sliding_window", [None, 75])
def test_rule_mode_does_not_depend_on_chunks(
    backend: AttentionBackend, recent: int, sliding_window: int | None
) -> None:
    """One token at a time, 128 at a time or all at once."""
    spec = AttentionSpec(0.125, sliding_window=sliding_window)
    case = Case(SMALL.with_(recent=recent), spec, heads=2, ratio=3, head_dim=64)
    results = []
    for chunks in ([300], [128, 128, 44], [3] * 100, [1] * 300):
        world = World(case, [300])
        outs = []
        for chunk in chunks:
            outs += world.step(backend, [chunk])
            world.keep_windows()
        results.append(torch.cat(outs))
    for other in results[1:]:
        assert_close(other, results[0], 1e-5)
    assert_close(results[0], world.expected(0, 0, 300))


@each_backend
@pytest.mark.parametrize("sliding_window", [None, 1500])
def test_long_histories(backend: AttentionBackend, sliding_window: int | None) -> None:
    """Several splits and tiles, each with its own maximum: they are brought to the same measure."""
    case = Case(SMALL, AttentionSpec(0.125, sliding_window=sliding_window), heads=1, ratio=3, head_dim=64)
    world = World(case, [2620])
    q, k, _ = world.data[0]
    q += 1.0
    k += (torch.arange(2620) // 200 % 4 * 0.25)[:, None, None]
    world.step(backend, [2600])
    for count in (1, 2, 17):
        start = world.done[0]
        out = world.step(backend, [count])[0]
        assert_close(out, world.expected(0, start, start + count))


def test_compiled_chunks_are_equal_to_the_last_bit() -> None:
    """Chunks longer than what decode takes, cut anywhere, with window pages freed between them, with any rotation."""
    spec = AttentionSpec(0.125, softcap=30.0)
    case = Case(SMALL.with_(recent=70), spec, heads=2, ratio=3, head_dim=64, exact=False)
    results = []
    for chunks in ([400], [17, 100, 283], [128, 128, 128, 16]):
        world = World(case, [400])
        outs = []
        for chunk in chunks[:-1] if chunks[-1] == 16 else chunks:
            outs += world.step(CpuBackend(), [chunk])
            world.keep_windows()
        results.append(torch.cat(outs)[:384])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_backend
def test_alone_or_batched_the_same_bits(backend: AttentionBackend) -> None:
    """A decode step's and a chunk's output do not depend on the other requests of the batch."""
    case = Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64)
    lengths = [5, 90, 210, 33]
    together, alone = World(case, lengths), World(case, lengths)
    for counts in ([4, 80, 200, 32], [1, 1, 1, 1], [0, 9, 9, 0]):
        outs = together.step(backend, counts)
        for b, count in enumerate(counts):
            single = [count if i == b else 0 for i in range(len(counts))]
            assert torch.equal(alone.step(backend, single)[b], outs[b])
    assert torch.equal(together.layer.pages, alone.layer.pages)


@each_backend
def test_a_lost_window_page_is_read_from_int2(backend: AttentionBackend) -> None:
    """An entry of 0 for an earlier token means INT2, for sink and recent tokens alike; new tokens are not affected."""
    case = Case(OscarConfig(sink=32, recent=64, page_size=16), PLAIN, heads=2, ratio=2, head_dim=64)
    for counts in ([1], [20], [40]):
        world = World(case, [100 + counts[0]])
        world.step(backend, [100])
        present = torch.ones(100 + counts[0], dtype=torch.bool)
        for page in (1, 3, 5):  # sink, history, recent
            world.free_window(0, page)
            present[page * 16 : page * 16 + 16] = False
        out = world.step(backend, counts)[0]
        assert_close(out, world.expected(0, 100, 100 + counts[0], present=present))


@each_backend
def test_new_tokens_without_a_window_page(backend: AttentionBackend) -> None:
    """The middle of a long chunk has no window pages: nothing is written there, yet its queries read it unquantized."""
    for length in (16, 150):
        case = Case(OscarConfig(sink=4, recent=8, page_size=16), PLAIN, heads=2, ratio=2, head_dim=64)
        world = World(case, [length])
        for page in range(1, length // 16 - 1):
            world.free_window(0, page)
        if length == 16:
            world.free_window(0, 0)
        windows = world.layer.windows.clone()
        out = world.step(backend, [length])[0]
        assert_close(out, world.expected(0, 0, length))
        untouched = [p for p in range(windows.shape[0]) if p not in world.tables[0].windows or p == 0]
        assert all(torch.isnan(world.layer.windows[p]).all() for p in untouched)


@each_backend
def test_tokens_without_a_page_are_not_written(backend: AttentionBackend) -> None:
    """Entry 0 of either table: the null pages keep their bytes."""
    case = Case(SMALL, PLAIN, heads=1, ratio=1, head_dim=64)
    world = World(case, [40])
    world.tables[0].pages[1] = 0
    world.tables[0].windows[0] = 0
    pages, windows = world.layer.pages.clone(), world.layer.windows.clone()
    _, k, v = world.data[0]
    backend.store(world.layer, k, v, world.batch([40]))
    assert torch.equal(world.layer.pages[0], pages[0])
    assert torch.isnan(world.layer.windows[0]).all()
    assert torch.isnan(windows).all()
    changed = (world.layer.pages != pages).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(p for p in world.tables[0].pages if p)


@each_backend
def test_a_random_rotation(backend: AttentionBackend) -> None:
    """With rotations that are not exact a code may fall the other way at a tie; the outputs stay close."""
    case = Case(SMALL, PLAIN, heads=2, ratio=4, head_dim=80, exact=False)
    world = World(case, [200])
    out = torch.cat([world.step(backend, [c])[0] for c in (150, 1, 1, 48)])
    error = (out.double() - world.expected(0, 0, 200)).abs()
    assert error.max() < 0.05
    assert error.mean() < 1e-4


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(backend: AttentionBackend, dtype: torch.dtype) -> None:
    """q, k and v in the model's type, as views with odd strides; the output has that type."""
    case = Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64)
    world = World(case, [60])
    world.data = [tuple(x.to(dtype).float() for x in world.data[0])]  # type: ignore[list-item]
    q, k, v = (x.to(dtype).transpose(0, 1).contiguous().transpose(0, 1) for x in world.data[0])
    for start, stop in ((0, 59), (59, 60)):
        tables = world.batch([stop - start])
        backend.store(world.layer, k[start:stop], v[start:stop], tables)
        out = backend.attend(world.layer, q[start:stop], k[start:stop], v[start:stop], tables)
        world.done = [stop]
        assert out.dtype == dtype
        assert_close(out, world.expected(0, start, stop), 1e-2)


@each_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plain_cache_is_ordinary_attention(backend: AttentionBackend, dtype: str) -> None:
    """No INT2 tier: softmax attention over K and V as they are."""
    case = Case(SMALL, PLAIN, heads=2, ratio=3, head_dim=64)
    world = World(case, [100, 30])
    world.layer = LayerCache.allocate_plain(2, 64, PLAIN, window_pages=12, page_size=16, dtype=dtype)  # type: ignore[arg-type]
    for b in range(2):
        world.data[b] = tuple(x.bfloat16().float() for x in world.data[b])  # type: ignore[call-overload]
    for counts in ([60, 29], [1, 1], [39, 0]):
        before = list(world.done)
        for b, out in enumerate(world.step(backend, counts)):
            q, k, v = world.data[b]
            stop = world.done[b]
            mask = torch.arange(stop) <= torch.arange(before[b], stop)[:, None]
            q, k, v = (x.double().transpose(0, 1) for x in (q[before[b] : stop], k[:stop], v[:stop]))
            k, v = (x.repeat_interleave(3, 0) for x in (k, v))
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
            assert_close(out, want.transpose(0, 1))


@each_backend
def test_degenerate_rows_stay_alone(backend: AttentionBackend) -> None:
    """Zero, constant, denormal, infinite and NaN rows in INT2 neither crash nor reach other rows."""
    case = Case(OscarConfig(sink=0, recent=1, page_size=16, window_dtype="float32"), PLAIN, 1, 1, 64, exact=False)
    world = World(case, [1000])
    q, k, v = world.data[0]
    odd = torch.arange(0, 999, 7)
    for x in (k, v):
        for n, row in enumerate(odd.tolist()):
            x[row] = [0.0, 3.25, 1e-41, torch.inf, torch.nan, -7e4][n % 6]
    world.run(backend, 0, [999])
    ordinary = torch.ones(1000, dtype=torch.bool)
    ordinary[odd] = False
    tidy = World(case, [1000])
    for x, y in zip(tidy.data[0], (q, k, v), strict=True):
        x[ordinary] = y[ordinary]
    tidy.run(backend, 0, [999])
    layout = tidy.layer.layout
    for view, want in zip(layout.byte_views(world.layer.pages), layout.byte_views(tidy.layer.pages), strict=True):
        pages = torch.tensor(world.tables[0].pages)
        got, expect = (x[pages].transpose(1, 2).flatten(0, 1)[:999] for x in (view, want))
        assert torch.equal(got[ordinary[:999]], expect[ordinary[:999]])


@each_backend
def test_long_scores_do_not_overflow(backend: AttentionBackend) -> None:
    """Scores of several thousands: the softmax picks one key, without NaN."""
    case = Case(SMALL, AttentionSpec(50.0), heads=1, ratio=2, head_dim=64)
    world = World(case, [64])
    out = torch.cat([world.step(backend, [c])[0] for c in (40, 1, 23)])
    assert torch.isfinite(out).all()
    assert_close(out, world.expected(0, 0, 64), 1e-3)


@each_backend
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not there")
def test_offsets_beyond_32_bits(backend: AttentionBackend) -> None:
    """Pages more than 2**31 bytes, and window pages more than 2**31 elements, into their stores."""

    def reserve(size: int) -> mmap.mmap:
        no_reserve = 0x4000  # MAP_NORESERVE, which the module does not know before Python 3.13
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)

    case = Case(OscarConfig(sink=4, recent=8, page_size=16, window_dtype="float16"), PLAIN, 1, 2, 64)
    world = World(case, [40])
    pages, windows, far = world.layer.pages, world.layer.windows, 2**31 + 4096
    store = torch.frombuffer(reserve(4 * far), dtype=torch.uint8)
    window_store = torch.frombuffer(reserve(8 * far), dtype=torch.float16)
    world.layer = replace(
        world.layer,
        pages=store.as_strided(pages.shape, (far, pages.stride(1), 1)),
        windows=window_store.as_strided(windows.shape, (far, *windows.stride()[1:])),
    )
    for count in (20, 18, 1, 1):
        start = world.done[0]
        assert_close(world.step(backend, [count])[0], world.expected(0, start, start + count))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, views of the stores apart."""

    def __init__(self, layer: LayerCache) -> None:
        super().__init__()
        self.largest = 0
        self._stores = {x.untyped_storage().data_ptr() for x in (layer.pages, layer.windows)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._stores:
                self.largest = max(self.largest, x.numel())
        return out


def test_scratch_does_not_grow_with_the_history() -> None:
    """The largest intermediate of a decode step and of a chunk is the same at 3000 and at 6000 tokens."""
    case = Case(SMALL, PLAIN, heads=1, ratio=1, head_dim=64)
    sizes: list[list[int]] = []
    for length in (3000, 6000):
        world = World(case, [length])
        world.step(TorchBackend(), [length - 101])
        sizes.append([])
        for count in (1, 100):
            tables = world.batch([count])
            start = world.done[0]
            q, k, v = (x[start : start + count] for x in world.data[0])
            TorchBackend().store(world.layer, k, v, tables)
            with LargestTensor(world.layer) as mode:
                TorchBackend().attend(world.layer, q, k, v, tables)
            sizes[-1].append(mode.largest)
            world.done = [start + count]
    assert sizes[0] == sizes[1]


def test_raw_keys_must_be_of_this_step() -> None:
    """A chunk that begins before the step's tokens is an error, not a wrong answer."""
    world = World(Case(SMALL, PLAIN, 1, 1, 64), [40])
    world.run(TorchBackend(), 0, [20])
    q, k, v = (x[20:40] for x in world.data[0])
    tables = world.batch([20])
    tables.host[2][0] = 10
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="chunk_start=10"):
            backend.attend(world.layer, q, k, v, tables)


def test_lloyd_max_is_not_served() -> None:
    """Levels for evaluation do not make a cache."""
    layout = PageLayout(64, OscarConfig(levels="lloyd_max"))
    with pytest.raises(ConfigError, match="levels='lloyd_max'"):
        LayerCache.allocate(layout, LayerTransform.plain(1, 64), PLAIN, pages=2, window_pages=2)


def test_a_cache_without_int2_pages_needs_an_endless_sink() -> None:
    """One page of INT2 is the null page: refused unless every position is a window position."""
    with pytest.raises(ConfigError, match="pages=1"):
        LayerCache.allocate(PageLayout(64, SMALL), LayerTransform.plain(1, 64), PLAIN, pages=1, window_pages=2)


def test_select_backend_by_device() -> None:
    """The compiled kernel on the CPU, PyTorch elsewhere."""
    assert select_backend("cpu").name == "cpu"
    assert select_backend("mps").name == "torch"
