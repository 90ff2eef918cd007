"""The store kernel writes the bytes of the torch codec, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_kernels.triton.decode import Windows
from oscar_kernels.triton.store import Transform, slots, split_rotation, store
from oscar_serving.codec import PageLayout, pack, quantize
from oscar_serving.config import OscarConfig
from tests.kernels_triton.cache import DEVICE

HEADS, TOKENS, WINDOW_PAGE = 2, 20, 16


def hard_rows(k: Tensor) -> Tensor:
    """Degenerate rows among ordinary ones."""
    k[0] = 0
    k[1] = 2.5
    k[2] = 1e-9
    k[3, 0, 5] = float("nan")
    k[4, 0, 7] = float("inf")
    k[4, 1, 3] = -float("inf")
    k[5] *= 1e5
    k[6] = -65000.0
    k[7] = 1e-41
    return k


@pytest.mark.parametrize(
    ("head_dim", "groups", "k_bits", "v_bits", "scale_dtype"),
    [
        (64, 1, 2, 2, "float16"),
        (64, 1, 2, 2, "float8_e4m3"),
        (80, 5, 2, 2, "float16"),
        (96, 1, 4, 4, "float16"),
        (128, 4, 4, 2, "float8_e4m3"),
        (192, 3, 4, 2, "float16"),
        (256, 2, 2, 4, "float8_e4m3"),
    ],
)
def test_same_bytes_as_the_codec(head_dim: int, groups: int, k_bits: int, v_bits: int, scale_dtype: str) -> None:
    torch.manual_seed(0)
    config = OscarConfig(
        k_bits=k_bits, v_bits=v_bits, group_size=head_dim // groups, page_size=32, scale_dtype=scale_dtype  # type: ignore[arg-type]
    )  # fmt: skip
    layout = PageLayout(head_dim, config)
    pages = torch.full((4, HEADS, layout.head_bytes), 0x5A, dtype=torch.uint8)
    windows = torch.full((4, 2, HEADS, WINDOW_PAGE, head_dim), 3.0, dtype=torch.bfloat16)
    want, window_want = pages.clone(), windows.clone()
    k, v = hard_rows(torch.randn(TOKENS, HEADS, head_dim) * 3), torch.randn(TOKENS, HEADS, head_dim)
    slot = torch.randperm(3 * 32)[:TOKENS] + 32
    window_slot = torch.randperm(3 * WINDOW_PAGE)[:TOKENS] + WINDOW_PAGE
    slot[8], window_slot[9], slot[10], window_slot[10] = -1, -1, -1, -1
    units = [torch.rand(HEADS) * 0.05 + 0.01 if scale_dtype != "float16" else torch.ones(HEADS) for _ in range(2)]
    sides = [Transform(None, None, torch.rand(HEADS) * 0.5 + 0.5, unit) for unit in units]
    views = layout.views(want)
    for i, (x, bits, side) in enumerate(((k, k_bits, sides[0]), (v, v_bits, sides[1]))):
        q = quantize(x, bits, layout.group_size, shrink=side.shrink, unit=side.unit, scale_dtype=config.scale_dtype)
        codes, meta = (views.k_codes, views.k_meta) if i == 0 else (views.v_codes, views.v_meta)
        kept = slot >= 0
        at = slot[kept] // 32, slot[kept] % 32
        codes[at[0], :, at[1]] = pack(q.codes, bits)[kept]
        meta.view(torch.uint8)[at[0], :, at[1]] = q.meta.view(torch.uint8)[kept]
        kept = window_slot >= 0
        wide = x[kept].to(windows.dtype)
        window_want[window_slot[kept] // WINDOW_PAGE, i, :, window_slot[kept] % WINDOW_PAGE] = wide
    pages, windows = pages.to(DEVICE), windows.to(DEVICE)
    moved = [Transform(None, None, s.shrink.to(DEVICE), s.unit.to(DEVICE)) for s in sides]
    store(
        k.to(DEVICE), v.to(DEVICE), layout.views(pages), Windows(windows[:, 0], windows[:, 1], slot.int()),
        slot.to(DEVICE), window_slot.to(DEVICE), *moved,
    )  # fmt: skip
    assert torch.equal(pages.cpu(), want)
    assert torch.equal(windows.cpu().nan_to_num(7.0), window_want.nan_to_num(7.0))


def stored(
    tokens: int, rotation: Tensor, mean: Tensor | None, k: Tensor, v: Tensor, **options: Any
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Quantized rows (read back) and their window rows of K and V, all tokens written to both stores."""
    layout = PageLayout(d := k.shape[-1], OscarConfig(page_size=32))
    pages = torch.zeros(tokens // 32 + 2, HEADS, layout.head_bytes, dtype=torch.uint8, device=DEVICE)
    windows = torch.zeros(tokens // 16 + 2, 2, HEADS, 16, d, dtype=torch.float32, device=DEVICE)
    slot = torch.arange(tokens, device=DEVICE) + 32
    one = torch.ones(HEADS, device=DEVICE)
    sides = [Transform(rotation[i], None if mean is None else mean[i], one, one) for i in range(2)]
    store(
        k, v, layout.views(pages), Windows(windows[:, 0], windows[:, 1], slot.int()), slot, slot - 16, *sides, **options
    )
    views = layout.views(pages)
    near = [windows[(slot - 16) // 16, i, :, (slot - 16) % 16] for i in range(2)]
    sections = ((views.k_codes, views.k_meta), (views.v_codes, views.v_meta))
    return [(c[slot // 32, :, slot % 32], m[slot // 32, :, slot % 32]) for c, m in sections], near


def rotations(d: int = 64) -> Tensor:
    return torch.linalg.qr(torch.randn(2, HEADS, d, d))[0].contiguous().to(DEVICE)


FORMS = ["tf32", "ieee", "two parts", "one part", "float16"]


def check_rotated(form: str, d: int, tokens: int, **options: Any) -> None:
    """The rotated rows in the window store, and the codec's bytes for these rows in the pages."""
    torch.manual_seed(1)
    rotation, mean = rotations(d), torch.randn(2, HEADS, d, device=DEVICE) * 4
    k, v = (torch.randn(tokens, HEADS, d, device=DEVICE) + m for m in mean)
    taken, tolerance = rotation, 2e-3
    if form in ("tf32", "ieee"):
        options["precision"] = form
    else:
        k, v = k.bfloat16(), v.bfloat16()
        kind = torch.float16 if form == "float16" else torch.bfloat16
        taken = torch.stack([split_rotation(r, kind, 2 if form == "two parts" else 1) for r in rotation])
        tolerance = {"two parts": 1e-5, "one part": 4e-3, "float16": 5e-4}[form]
    read, near = stored(tokens, taken, mean, k, v, **options)
    for i, (x, (codes, meta)) in enumerate(zip((k, v), read, strict=True)):
        want = torch.einsum("thd,hde->the", x.float() - mean[i], rotation[i])
        assert (near[i] - want).norm() / want.norm() < tolerance
        own = quantize(near[i], 2, d)
        assert torch.equal(codes, pack(own.codes, 2))
        assert torch.equal(meta.view(torch.int16), own.meta.view(torch.int16))


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(FORMS), st.sampled_from([16, 64]), st.integers(1, 3))
def test_rotates_and_centers(form: str, block: int, tiles: int) -> None:
    check_rotated(form, 64, 70, block=block, tiles=tiles)


@pytest.mark.parametrize("form", ["tf32", "two parts"])
@pytest.mark.parametrize("d", [80, 192, 256])
def test_rotates_heads_of_other_sizes(form: str, d: int) -> None:
    """80: padded planes; 192 and 256: the matrix in pieces."""
    check_rotated(form, d, 20)


def test_odd_tokens_do_not_reach_their_neighbours() -> None:
    """Infinite and NaN tokens beside ordinary ones, in the tiles that take the careful path and in others."""
    torch.manual_seed(2)
    rotation = torch.stack([split_rotation(r, torch.bfloat16) for r in rotations()])
    k = torch.randn(2, 130, HEADS, 64, device=DEVICE).bfloat16()
    odd = k.clone()
    odd[:, 3, 0, 5], odd[:, 7, :, 9], odd[:, 70, 1] = float("nan"), float("inf"), 3e38
    tidy, _ = stored(130, rotation, None, k[0], k[1], block=64, tiles=2)
    read, near = stored(130, rotation, None, odd[0], odd[1], block=64, tiles=2)
    same = torch.ones(130, HEADS, dtype=torch.bool)
    same[3, 0] = same[7] = same[70, 1] = False
    for i in range(2):
        for got, want in zip(read[i], tidy[i], strict=True):
            assert torch.equal(got[same].float(), want[same].float())
        own = quantize(near[i], 2, 64)
        assert torch.equal(read[i][0], pack(own.codes, 2))
    assert torch.isnan(near[0][3, 0]).all()


def test_a_split_rotation_of_another_type_is_refused() -> None:
    rotation = torch.stack([split_rotation(r, torch.bfloat16) for r in rotations()])
    k = torch.zeros(4, HEADS, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"bfloat16 does not serve tokens in torch\.float32"):
        stored(4, rotation, None, k, k)


@pytest.mark.parametrize("ring", [0, 24])
def test_slots_follow_the_tables(ring: int) -> None:
    lengths, starts = [50, 0, 7], [0, 40, 40, 44]
    page_table = torch.tensor([[4, 5], [0, 0], [6, 0]], dtype=torch.int32, device=DEVICE)
    window = torch.tensor([[3, 0, 1, 2], [0, 0, 0, 0], [7, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    rows = 32 if ring else 16
    store_ = torch.zeros(8, 1, rows, 8, device=DEVICE)
    out, window_out = (torch.full((44,), -7, dtype=torch.int64, device=DEVICE) for _ in range(2))
    slots(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_table, Windows(store_, store_, window, ring), out=out, window_out=window_out, page_size=32, sink=8,
        max_queries=40,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        count = starts[b + 1] - starts[b]
        for i in range(count):
            position = length - count + i
            assert out[starts[b] + i] == page_table[b, position // 32] * 32 + position % 32
            if ring:
                place = position if position < 8 else 8 + position % ring
                kept = position < 8 or position >= length - ring
                want = int(window[b, 0]) * rows + place if kept else -1
            else:
                entry = int(window[b, position // 16])
                want = entry * 16 + position % 16 if entry else -1
            assert window_out[starts[b] + i] == want


def test_page_offsets_beyond_31_bits() -> None:
    """A page far into a huge pool: the offset does not fit 32 bits. Untouched memory costs nothing."""
    layout = PageLayout(64, OscarConfig(page_size=32))
    count = (1 << 32) // layout.head_bytes + 3
    pages = torch.empty(count, 1, layout.head_bytes, dtype=torch.uint8, device=DEVICE)
    windows = torch.zeros(3, 2, 1, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    k, v, one = torch.randn(1, 1, 64, device=DEVICE), torch.randn(1, 1, 64, device=DEVICE), torch.ones(1, device=DEVICE)
    slot = torch.tensor([(count - 1) * 32 + 5], device=DEVICE)
    side = Transform(None, None, one, one)
    pages[-1] = 0xFF
    store(k, v, layout.views(pages), Windows(windows[:, 0], windows[:, 1], slot.int()), slot, slot * 0 - 1, side, side)
    last = layout.views(pages[-1:])
    q = quantize(k[0].cpu(), 2, 64)
    assert torch.equal(last.k_codes[0, :, 5].cpu(), pack(q.codes, 2))
    assert torch.equal(last.k_meta[0, :, 5].cpu(), q.meta)
    assert (last.k_codes[0, :, 6] == 0xFF).all()
