"""The compiled store writes the bytes that the codec defines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_serving.attention import AttentionSpec, LayerCache
from oscar_serving.attention.cpu_backend import CpuBackend, describe
from oscar_serving.attention.torch_backend import TorchBackend, packed
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform
from tests.attention.cases import Case, World

SPEC = AttentionSpec(0.1)


def written(case: Case, k: Tensor, v: Tensor, backend: TorchBackend | CpuBackend) -> LayerCache:
    """A cache with ``k, v`` ``[tokens, heads, d]`` in it."""
    world = World(case, [len(k)])
    backend.store(world.layer, k, v, world.batch([len(k)]))
    return world.layer


def assert_same_bytes(case: Case, k: Tensor, v: Tensor) -> None:
    """Both stores are equal bit for bit, whatever was there before included."""
    ours, codec = (written(case, k, v, backend) for backend in (CpuBackend(), TorchBackend()))
    assert torch.equal(ours.pages, codec.pages)
    as_int = torch.int32 if ours.windows.dtype == torch.float32 else torch.int16
    assert torch.equal(ours.windows.view(as_int), codec.windows.view(as_int))


@settings(max_examples=40, deadline=None)
@given(
    head_dim=st.sampled_from([16, 24, 40, 64, 80, 96, 128, 192, 256]),
    bits=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4])),
    group=st.sampled_from([None, 8, 16, 32]),
    scale=st.sampled_from(["float16", "float8_e4m3"]),
    window=st.sampled_from(["bfloat16", "float16", "float32"]),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_bytes_equal_the_codec(
    head_dim: int, bits: tuple[int, int], group: int | None, scale: str, window: str, tokens: int, seed: int
) -> None:
    """Every layout."""
    config = OscarConfig(
        k_bits=bits[0],
        v_bits=bits[1],
        group_size=group if group and head_dim % group == 0 else None,
        page_size=16,
        scale_dtype=scale,  # type: ignore[arg-type]
        window_dtype=window,  # type: ignore[arg-type]
    )
    case = Case(config, SPEC, heads=2, ratio=1, head_dim=head_dim, seed=seed)
    _, k, v = case.tokens(tokens, seed)
    assert_same_bytes(case, k, v)


@pytest.mark.parametrize("scale", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_of_odd_numbers(scale: str, bits: int) -> None:
    """A thousand rows of every magnitude, with zeros, constants, denormals, infinities and NaN; no rotation."""
    config = OscarConfig(k_bits=bits, v_bits=bits, page_size=16, scale_dtype=scale, window_dtype="float16")  # type: ignore[arg-type]
    case = Unrotated(config, SPEC, heads=1, ratio=1, head_dim=32)
    g = torch.Generator().manual_seed(3)
    magnitude = torch.exp2(torch.randint(-40, 20, (1000, 1, 1), generator=g).float())
    k = torch.randn(1000, 1, 32, generator=g) * magnitude
    odd = [0.0, 5.0, -5.0, 1e-42, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, 448.0, 2**-9]
    for row, value in enumerate(odd):
        k[row] = value
        k[50 + row, 0, 3] = value
    v = (k.roll(1, 0) * 4).round() / 4
    assert_codec_bytes(case, k, v)


def assert_codec_bytes(case: Case, k: Tensor, v: Tensor) -> None:
    """The pages hold what the codec makes of ``k, v`` as they are."""
    world = World(case, [len(k)])
    CpuBackend().store(world.layer, k, v, world.batch([len(k)]))
    pages = torch.tensor(world.tables[0].pages)
    for view, want in zip(world.layer.layout.byte_views(world.layer.pages), packed(world.layer, k, v), strict=True):
        got = view[pages].transpose(1, 2).flatten(0, 1)[: len(k)]
        different = (got != want).flatten(1).any(1).nonzero().flatten().tolist()
        assert different == []


class Unrotated(Case):
    """Rows reach the codec as they are."""

    def transform(self) -> LayerTransform:
        """Identity."""
        return LayerTransform.plain(self.heads, self.head_dim, rotate=False, shrink=0.75)


def test_bytes_of_every_scale() -> None:
    """Scales and minima at each FP8 and float16 value and between them: ties go to the even neighbour."""
    fp8 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    half = torch.arange(1, 0x7C00, 37, dtype=torch.int16).view(torch.float16).float()
    for scale, values in (("float8_e4m3", fp8), ("float16", half)):
        values = torch.cat([values, (values[1:] + values[:-1]) / 2, -values])
        k = torch.zeros(len(values), 1, 16)
        k[:, 0, 0], k[:, 0, 1:] = values, values[:, None] * torch.linspace(0, 3, 15)
        config = OscarConfig(page_size=16, scale_dtype=scale, window_dtype="float16")  # type: ignore[arg-type]
        assert_codec_bytes(Unrotated(config, SPEC, heads=1, ratio=1, head_dim=16), k, -k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_stored_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """With any rotation: a token's bytes are the same alone, in a chunk, and by strided views."""
    case = Case(OscarConfig(page_size=16), SPEC, heads=3, ratio=1, head_dim=96, exact=False)
    _, k, v = (x.to(dtype) for x in case.tokens(50))
    whole = World(case, [50])
    backend = CpuBackend()
    backend.store(whole.layer, k, v, whole.batch([50]))
    parts = World(case, [50])
    for start, stop in ((0, 1), (1, 18), (18, 50)):
        a, b = (x[start:stop].transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
        backend.store(parts.layer, a, b, parts.batch([stop - start]))
        parts.done = [stop]
    assert torch.equal(whole.layer.pages, parts.layer.pages)


def test_rotation_is_the_transforms() -> None:
    """The kernel's rotation against float64."""
    case = Case(OscarConfig(page_size=16), SPEC, heads=2, ratio=1, head_dim=80, exact=False)
    layer = case.cache(2, 2)
    _, k, v = case.tokens(9)
    kernels = CpuBackend().kernels
    for x, value in ((k, False), (v, True)):
        t = layer.transform
        mean, rotation = (t.v_mean, t.v_rotation) if value else (t.k_mean, t.k_rotation)
        want = torch.einsum("thd,hde->the", x.double() - mean, rotation.double())
        torch.testing.assert_close(kernels.rotate(describe(layer), x, value=value).double(), want, rtol=1e-5, atol=1e-5)
