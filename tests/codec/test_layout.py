"""Where the bytes of a page are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.attention import AttentionSpec, LayerCache
from oscar_serving.codec import PageLayout, dequantize, pack, quantize, unpack
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform

from .heads import bits, groups, scale_dtypes

layouts = st.builds(
    lambda dims, k, v, scale, page: PageLayout(
        dims[0], OscarConfig(k_bits=k, v_bits=v, group_size=dims[1], scale_dtype=scale, page_size=page)
    ),
    groups,
    bits,
    bits,
    scale_dtypes,
    st.sampled_from([16, 32, 48, 128]),
)


@settings(deadline=None, max_examples=200)
@given(layout=layouts, heads=st.integers(1, 8))
def test_bytes_are_those_of_the_buffers(layout: PageLayout, heads: int) -> None:
    config, d = layout.config, layout.head_dim
    cache = LayerCache.allocate(
        layout, LayerTransform.plain(heads, d, rotate=False), AttentionSpec(1.0), pages=3, window_pages=2
    )
    assert cache.pages.nbytes == 3 * layout.page_bytes(heads)
    assert cache.windows.nbytes == 2 * layout.window_page_bytes(heads)
    assert layout.bytes_per_token(heads) * config.page_size * 3 == cache.pages.nbytes
    # Counted by hand: codes, and a scale and a minimum a group, of K and of V.
    meta = 2 * (2 if config.scale_dtype == "float16" else 1) * (d // layout.group_size)
    assert layout.bytes_per_token(heads) == heads * (d * (config.k_bits + config.v_bits) / 8 + 2 * meta)
    assert layout.bits_per_element == layout.bytes_per_token(heads) * 8 / (2 * heads * d)


@settings(deadline=None, max_examples=100)
@given(layout=layouts)
def test_sections_tile_the_page_aligned(layout: PageLayout) -> None:
    """Each byte belongs to one section; each section begins at a multiple of 16 bytes."""
    pages = torch.zeros(2, 3, layout.head_bytes, dtype=torch.uint8)
    for number, view in enumerate(layout.byte_views(pages), 1):
        assert view.storage_offset() % 16 == 0
        assert (view == 0).all(), "sections overlap"
        view.fill_(number)
    assert (pages > 0).all()
    assert layout.head_bytes % 16 == 0


@settings(deadline=None, max_examples=100)
@given(layout=layouts, heads=st.integers(1, 3), padding=st.integers(0, 2), seed=st.integers(0, 1000))
def test_tokens_read_back_and_nothing_else_is_touched(layout: PageLayout, heads: int, padding: int, seed: int) -> None:
    """Also where pages are further apart than they are long, as engines align them."""
    config, d = layout.config, layout.head_dim
    generator = torch.Generator().manual_seed(seed)
    store = torch.full((3, heads + padding, layout.head_bytes + 16 * padding), 0xAB, dtype=torch.uint8)
    pages = store[:, :heads, : layout.head_bytes]
    unit = torch.full((heads,), 2.0**-6)
    unit = unit if config.scale_dtype == "float8_e4m3" else torch.ones(heads)
    slot = int(torch.randint(config.page_size, (), generator=generator))
    views = layout.views(pages)
    untouched = store.clone()
    x = torch.randn(2, heads, d, generator=generator)
    expected = []
    for side, n in enumerate((config.k_bits, config.v_bits)):
        q = quantize(x[side], n, layout.group_size, unit=unit, scale_dtype=config.scale_dtype)
        views[2 * side][1, :, slot] = pack(q.codes, n)
        views[2 * side + 1][1, :, slot] = q.meta
        expected.append(dequantize(*q, unit=unit, bits=n))
    for side, n in enumerate((config.k_bits, config.v_bits)):
        codes, meta = layout.views(pages)[2 * side : 2 * side + 2]
        back = dequantize(unpack(codes[1, :, slot], n), meta[1, :, slot], unit=unit, bits=n)
        assert torch.equal(back, expected[side])
    for section in layout.byte_views(pages):
        section[1, :, slot] = 0xAB
    assert torch.equal(store, untouched)


@pytest.mark.parametrize(
    ("head_dim", "options", "expected"),
    [
        (128, {}, 2.25),
        (64, {"scale_dtype": "float8_e4m3"}, 2.25),
        (64, {}, 2.5),
        (128, {"k_bits": 4}, 3.25),
        (256, {"group_size": 64}, 2.5),
    ],
)
def test_published_sizes(head_dim: int, options: dict[str, object], expected: float) -> None:
    layout = PageLayout(head_dim, OscarConfig.from_dict(dict(options)))
    assert layout.bits_per_element == expected


def test_a_page_of_36_bytes_a_token_head() -> None:
    """The published figure: 36 bytes for K and for V at head size 128, 7.1 times less than BF16."""
    layout = PageLayout(128, OscarConfig())
    assert layout.bytes_per_token(1) == 2 * 36
    assert layout.window_page_bytes(1) / layout.page_bytes(1) == pytest.approx(7.1, abs=0.05)


@pytest.mark.parametrize("window_dtype", ["bfloat16", "float16", "float32"])
def test_window_pages(window_dtype: str) -> None:
    layout = PageLayout(64, OscarConfig.from_dict({"window_dtype": window_dtype}))
    assert layout.window_page_bytes(3) == 3 * 2 * 32 * 64 * (4 if window_dtype == "float32" else 2)


def test_wrong_buffers_are_refused() -> None:
    layout = PageLayout(64, OscarConfig())
    good = torch.zeros(2, 3, layout.head_bytes, dtype=torch.uint8)
    for bad in (good.to(torch.int8), good[0], good[..., :-1], torch.zeros(2, layout.head_bytes, 3).byte().mT):
        with pytest.raises(ValueError, match=rf"pages must be uint8 \[pages, heads, {layout.head_bytes}\]"):
            layout.views(bad)


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    config = OscarConfig(group_size=64)
    with pytest.raises(ValueError, match="group_size=64: must divide the head size 96"):
        PageLayout(96, config)
    with pytest.raises(ValueError, match="head_dim=20: allowed is a multiple of 8"):
        PageLayout(20, replace(config, group_size=None))
