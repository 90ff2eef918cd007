"""The CUDA decode kernel against the float64 reference, on a GPU; its source compiles without one where nvcc is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from oscar_kernels.cuda.decode import Plan, back_matrix, decode, plan, supported, turn_matrix, workspace_size
from oscar_serving.attention.reference import Reference, reference_attention
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.codec import PageLayout, pack, quantize
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform, spectral_rotation
from tests.maps import apart

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

#: head size, K bits, V bits, group, scale type, KV heads, ratio, queries, page, window page, sliding, softcap
CASES = [
    (128, 2, 2, None, "float16", 2, 4, 1, 128, 16, None, None),
    (128, 2, 2, None, "float16", 2, 4, 1, 64, 64, None, None),
    (64, 2, 2, None, "float8_e4m3", 3, 3, 1, 32, 32, None, None),
    (128, 4, 2, None, "float16", 2, 8, 1, 128, 16, None, None),
    (128, 2, 4, 64, "float16", 2, 4, 1, 128, 16, None, None),
    (256, 2, 2, 64, "float8_e4m3", 1, 4, 1, 64, 32, None, None),
    (128, 2, 2, None, "float16", 2, 4, 4, 128, 16, None, None),
    (128, 2, 2, None, "float16", 2, 4, 3, 128, 16, 200, None),
    (128, 2, 2, 32, "float16", 2, 1, 1, 128, 16, None, 20.0),
    (128, 2, 2, None, "float16", 2, 24, 2, 128, 16, None, None),
    (64, 4, 4, None, "float16", 2, 2, 1, 32, 16, None, None),
]
LENGTHS = [1013, 5, 64, 333, 2048]


def transform_of(heads: int, d: int, *, units: bool) -> LayerTransform:
    a = torch.randn(2 * heads, d, d)
    rotation = spectral_rotation(a @ a.mT).float()
    unit = torch.full((heads,), 0.37 if units else 1.0)
    return LayerTransform(
        *apart(rotation[:heads]),
        rotation[heads:].contiguous(),
        torch.randn(heads, d) * 0.5,
        torch.randn(heads, d) * 0.5,
        torch.full((heads,), 0.9),
        torch.full((heads,), 0.85),
        unit,
        unit * (0.6 if units else 1.0),
    )


class Store:
    """Pages and windows of a ragged batch, poisoned where nothing was written."""

    def __init__(self, layout: PageLayout, win_page: int, heads: int, lengths: list[int]) -> None:
        d, page = layout.head_dim, layout.config.page_size
        self.layout, self.win_page, self.lengths = layout, win_page, lengths
        counts = [-(-n // page) for n in lengths], [-(-n // win_page) for n in lengths]
        self.pages = torch.full((sum(counts[0]) + 1, heads, layout.head_bytes), 0xFF, dtype=torch.uint8)
        self.windows = torch.full((sum(counts[1]) + 1, 2, heads, win_page, d), torch.nan, dtype=torch.bfloat16)
        self.tables = []
        for count in counts:
            ids, table = (
                torch.randperm(sum(count)) + 1,
                torch.zeros(len(lengths), max(count), dtype=torch.int32),
            )
            for row, part in zip(table, ids.split(count), strict=True):
                row[: len(part)] = part
            self.tables.append(table)

    def write(self, request: int, k: torch.Tensor, v: torch.Tensor, transform: LayerTransform, queries: int) -> None:
        config, group = self.layout.config, self.layout.group_size
        views = self.layout.views(self.pages)
        position = torch.arange(len(k))
        page = self.tables[0][request, position // config.page_size].long()
        slot = position % config.page_size
        rotated = transform.rotate_k(k), transform.rotate_v(v)
        for i, (x, bits, shrink, unit) in enumerate(
            (
                (rotated[0], config.k_bits, transform.k_shrink, transform.k_unit),
                (rotated[1], config.v_bits, transform.v_shrink, transform.v_unit),
            )
        ):
            q = quantize(x, bits, group, shrink=shrink, unit=unit, scale_dtype=config.scale_dtype)
            views[2 * i][page, :, slot] = pack(q.codes, bits)
            raw = torch.uint8 if config.scale_dtype == "float8_e4m3" else torch.int16
            views[2 * i + 1].view(raw)[page, :, slot] = q.meta.view(raw)
        keep = (position < config.sink) | (position > len(k) - queries - config.recent)
        kept = position[keep]
        page, slot = self.tables[1][request, kept // self.win_page].long(), kept % self.win_page
        for i in range(2):
            self.windows[page, i, :, slot] = rotated[i][keep].bfloat16()
        for p in range(-(-len(k) // self.win_page)):
            if not keep[p * self.win_page : (p + 1) * self.win_page].any():
                self.tables[1][request, p] = 0


def run(
    case: tuple, geometry: Plan | None = None, drop_windows: bool = False, rotate: bool = False
) -> tuple[torch.Tensor, torch.Tensor, list[Reference]]:
    d, k_bits, v_bits, group, scale_dtype, heads, ratio, queries, page, win_page, sliding, softcap = case
    config = OscarConfig(
        k_bits=k_bits,
        v_bits=v_bits,
        group_size=group,
        sink=64,
        recent=100,
        scale_dtype=scale_dtype,
        page_size=page,
    )
    lengths = [max(n, queries) for n in LENGTHS]
    transform = transform_of(heads, d, units=scale_dtype != "float16")
    spec = AttentionSpec(d**-0.5, softcap=softcap, sliding_window=sliding)
    store = Store(PageLayout(d, config), win_page, heads, lengths)
    qs, references = [], []
    for request, n in enumerate(lengths):
        k, v = torch.randn(n, heads, d) * 1.5 + torch.randn(heads, d), torch.randn(n, heads, d)
        q = (torch.randn(queries, heads * ratio, d) * 2).bfloat16().float()
        store.write(request, k, v, transform, queries)
        present = torch.ones(n, dtype=torch.bool)
        if drop_windows:
            store.tables[1][request, 1:3] = 0
            present[win_page : 3 * win_page] = False
        qs.append(q)
        references.append(
            reference_attention(q, k, v, transform=transform, config=config, spec=spec, window_present=present)
        )
    q = torch.cat(qs)
    bias = torch.einsum("thgd,hd->thg", q.unflatten(1, (heads, -1)), transform.k_mean).flatten(1)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    geometry = geometry or plan(
        len(lengths), heads, ratio, d, page, max_queries=queries, max_length=max(lengths), sms=sms
    )
    floats, ints = workspace_size(len(lengths), heads, d, geometry)
    partial = torch.full((floats,), torch.nan, device="cuda")
    arrived = torch.zeros(ints, dtype=torch.int32, device="cuda")
    out = torch.full((len(q), heads * ratio, d), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((len(q), heads * ratio), torch.nan, device="cuda")
    windows = store.windows.cuda()
    wide = torch.cat([q.flatten(1), torch.full((len(q), 64), torch.nan)], 1).bfloat16().cuda()  # as in a fused QKV
    for _ in range(2):  # the second launch finds the workspace as the first one left it
        decode(
            wide[:, : heads * ratio * d].unflatten(1, (-1, d)) if rotate else transform.rotate_q(q).cuda(),
            tuple(store.layout.views(store.pages.cuda())),
            (windows[:, 0], windows[:, 1]),
            store.tables[0].cuda(),
            store.tables[1].cuda(),
            (torch.arange(len(lengths) + 1) * queries).int().cuda(),
            torch.tensor(lengths).int().cuda(),
            geometry=geometry,
            k_turn=turn_matrix(transform.q_rotation).cuda() if rotate else None,
            partial=partial,
            arrived=arrived,
            out=out,
            lse=lse,
            sink=config.sink,
            recent=config.recent,
            scale=spec.scale,
            k_unit=transform.k_unit.cuda(),
            v_unit=transform.v_unit.cuda(),
            q_bias=bias.cuda(),
            v_back=back_matrix(transform.v_rotation).cuda(),
            v_mean=transform.v_mean.cuda(),
            sliding_window=sliding,
            softcap=softcap,
        )
    assert arrived.abs().sum().item() == 0
    return out.cpu().double(), lse.cpu().double(), references


def check(case: tuple, **options: object) -> None:
    torch.manual_seed(0)
    out, lse, references = run(case, **options)  # type: ignore[arg-type]
    queries = case[7]
    for i, reference in enumerate(references):
        ours = out[i * queries : (i + 1) * queries]
        assert (ours - reference.output).norm() <= 5e-3 * reference.output.norm()
    assert (lse - torch.cat([r.lse for r in references])).abs().max() < 0.02


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: tuple) -> None:
    check(case)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("splits", "thin"), [(1, 0), (3, 0), (12, 8), (30, 10)])
def test_splits_do_not_change_the_result(splits: int, thin: int) -> None:
    case = CASES[0]
    geometry = plan(5, 2, 4, 128, 128, max_queries=1, max_length=2048, sms=132)
    check(case, geometry=geometry._replace(splits=splits, thin=thin))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6]])
def test_missing_window_pages_are_read_packed(case: tuple) -> None:
    check(case, drop_windows=True)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_rotates_the_query_itself(case: tuple) -> None:
    check(case, rotate=True)


def test_refuses_what_it_cannot_serve() -> None:
    assert supported(128, 2, 2, 1, 128, 16) is None
    assert "head size 80" in str(supported(80, 2, 2, 1, 128, 16))
    assert "groups" in str(supported(128, 4, 2, 4, 128, 16))
    assert "page size 48" in str(supported(128, 2, 2, 1, 48, 16))


@pytest.mark.parametrize("batch", [1, 3, 32, 128, 1000])
def test_plan_fits_the_merge_and_covers_small_batches(batch: int) -> None:
    for length in (64, 2048, 100_000, 1_000_000):
        geometry = plan(batch, 8, 4, 128, 128, max_queries=1, max_length=length, sms=132)
        assert geometry.splits >= 1
        assert geometry.splits <= 4 * 128  # merge weights
        if batch * 8 < 132 and length >= 100_000:
            assert batch * 8 * geometry.splits > 132


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["80", "89", "90"])
def test_source_compiles_without_spills_that_matter(arch: str, tmp_path: Path) -> None:
    source = Path(decode.__code__.co_filename).with_name("decode.cu")
    done = subprocess.run(
        ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "x", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
