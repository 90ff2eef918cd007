"""Prefill behind a long INT2 history beside one FlashAttention 3 call over unquantized keys."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_data import Shape
from oscar_kernels.triton.decode import Windows
from oscar_kernels.triton.store import Transform, split_rotation, store
from oscar_serving.attention import AttentionSpec, history
from oscar_serving.cache.rule import reads_window
from oscar_serving.codec import PageLayout, dequantize, unpack
from oscar_serving.config import OscarConfig

CASE = "prefill, 16K new over 84K history"
#: Keys and values that are read back are rounded to bfloat16, and so is each part that is merged.
ERROR_LIMIT = 8e-3


def flash3(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
    window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention 3 in the form of :class:`oscar_serving.attention.history.Flash`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    result: tuple[Tensor, Tensor] = flash_attn_varlen_func(
        q, k, v, max_q, cu_q, max_k, cu_k, softmax_scale=scale, causal=causal,
        window_size=[-1, -1] if window is None else [window - 1, 0], softcap=softcap or 0.0, s_aux=sinks,
        return_softmax_lse=True, out=out, fa_version=3,
    )[:2]  # fmt: skip
    return result


@dataclass
class Prefill:
    """One request: a history in both stores, and a chunk of new tokens."""

    stores: history.Stores
    q: Tensor
    k: Tensor
    v: Tensor
    context: int
    page_table: Tensor
    window_table: Tensor

    @classmethod
    def make(cls, shape: Shape, context: int, new: int, device: torch.device) -> Prefill:
        """Tokens written by the store kernel; window pages for the sink and the last tokens before the chunk."""
        length, heads, d = context + new, shape.heads, shape.head_dim
        rng = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng, device=device)

        k, v = (normal(length, heads, d).bfloat16() for _ in range(2))
        q = normal(new, shape.query_heads, d).bfloat16()
        rotation = torch.linalg.qr(normal(heads, d, d))[0].contiguous()
        one = torch.ones(heads, device=device)
        config = OscarConfig(
            k_bits=shape.k_bits, v_bits=shape.v_bits, sink=shape.sink, recent=shape.recent, page_size=shape.page_size
        )
        layout = PageLayout(d, config)
        count, wcount = -(-length // shape.page_size), -(-length // shape.window_page)
        pages = torch.zeros(count + 1, heads, layout.head_bytes, dtype=torch.uint8, device=device)
        page_table = torch.randperm(count, generator=rng, device=device).int() + 1
        first = torch.arange(wcount, device=device) * shape.window_page
        kept = (first < shape.sink) | ((first >= context - shape.recent - shape.window_page) & (first < context))
        window_table = torch.where(kept, kept.cumsum(0), 0).int()
        windows = torch.zeros(int(kept.sum()) + 1, 2, heads, shape.window_page, d, device=device).bfloat16()
        position = torch.arange(length, device=device)
        slot = page_table.long()[position // shape.page_size] * shape.page_size + position % shape.page_size
        wpage = window_table.long()[position // shape.window_page]
        wslot = torch.where(wpage > 0, wpage * shape.window_page + position % shape.window_page, -1)
        side = Transform(split_rotation(rotation, torch.bfloat16), None, one * 0.9, one)
        views = layout.views(pages)
        sections = views.k_codes, views.k_meta, views.v_codes, views.v_meta
        store(k, v, sections, Windows(windows[:, 0], windows[:, 1], window_table[None]), slot, wslot, side, side)
        stores = history.Stores(
            sections, windows, rotation, rotation, one, one, None, None, config, AttentionSpec(d**-0.5)
        )
        return cls(stores, q, k, v, context, page_table[None], window_table[None])

    def run(self, rows: int) -> tuple[Callable[[], object], Tensor]:
        """The engine's path with ``rows`` rows of scratch, and its output."""
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

        new, device = self.q.shape[0], self.q.device
        query_start = torch.tensor([0, new], dtype=torch.int32, device=device)
        context = torch.tensor([self.context], dtype=torch.int32, device=device)
        groups = history.plan_groups(
            query_start, context, [new], [self.context], recent=self.stores.config.recent, rule=False, rows=rows
        )
        shape = (rows, *self.k.shape[1:])
        scratch = self.k.new_empty(shape), self.k.new_empty(shape)
        out = torch.full_like(self.q, float("nan"))
        k, v = self.k[self.context :], self.v[self.context :]

        def run() -> None:
            history.attend(
                self.stores, self.q, k, v, out, query_start=query_start, longest_query=new, groups=groups,
                page_table=self.page_table, window_table=self.window_table, scratch=scratch, flash=flash3,
                merge=merge_attn_states,
            )  # fmt: skip

        return run, out

    def reference(self) -> Tensor:
        """Output in float64 on the stored codes and windows, mode raw."""
        config, ratio = self.stores.config, self.q.shape[1] // self.k.shape[1]
        length, new = self.k.shape[0], self.q.shape[0]
        key = torch.arange(length, device=self.q.device)
        query = torch.arange(length - new, length, device=self.q.device)[:, None]
        page = self.page_table[0].long()[key // config.page_size]
        size = self.stores.windows.shape[3]
        entry = self.window_table[0].long()[key // size]
        near = reads_window(key, query, sink=config.sink, recent=config.recent)
        own = key >= self.context
        back = self.stores.q_rotation.double().mT
        tiers = []
        for i, raw in ((0, self.k), (1, self.v)):
            codes, meta = (self.stores.sections[2 * i + j][page, :, key % config.page_size] for j in (0, 1))
            bits = config.v_bits if i else config.k_bits
            packed = dequantize(unpack(codes, bits), meta, bits=bits, dtype=torch.float64)
            wide = self.stores.windows[entry, i, :, key % size].double()
            both = [torch.einsum("the,hed->thd", x, back) for x in (packed, wide)]
            tiers.append([torch.where(own[:, None, None], raw.double(), x).repeat_interleave(ratio, 1) for x in both])
        q = self.q.double()
        dots = [torch.einsum("qhd,khd->hqk", q, k) for k in tiers[0]]
        score = torch.where(near, dots[1], dots[0]) * self.stores.spec.scale
        p = torch.softmax(score.masked_fill(key > query, -torch.inf), -1)
        packed, wide = tiers[1]
        return torch.einsum("hqk,khd->qhd", p * near, wide) + torch.einsum("hqk,khd->qhd", p * ~near, packed)

    def baseline(self) -> Callable[[], object]:
        """One call over all keys in BF16, paged as vLLM pages them."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        page, length, new, d = 128, self.k.shape[0], self.q.shape[0], self.q.shape[-1]
        count, device = -(-length // page), self.q.device
        caches = []
        order = torch.randperm(count, device=device)
        for x in (self.k, self.v):
            cache = torch.zeros(count * page, *x.shape[1:], dtype=x.dtype, device=device)
            cache[:length] = x
            paged = torch.empty(count, page, *x.shape[1:], dtype=x.dtype, device=device)
            paged[order] = cache.view_as(paged)
            caches.append(paged)
        table = order.int()[None]
        query_start = torch.tensor([0, new], dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        out = torch.empty_like(self.q)

        def run() -> None:
            flash_attn_varlen_func(
                self.q, *caches, new, query_start, length, seqused_k=lengths, softmax_scale=d**-0.5, causal=True,
                block_table=table, out=out, fa_version=3,
            )  # fmt: skip

        return run


def timed(run: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds after two runs to warm up."""
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def small_error(device: torch.device) -> float:
    """Relative error of a short chunk over a history of several tiles, against the float64 reference."""
    case = Prefill.make(Shape(), 1500, 300, device)
    run, out = case.run(1024)
    run()
    want = case.reference()
    return ((out.double() - want).norm() / want.norm()).item()


def prefill_rows(device: torch.device) -> list[dict[str, Any]]:
    """Measure the case, after a small one has been held against the reference."""
    if importlib.util.find_spec("vllm") is None:
        print("prefill: not measured, vllm is not installed")
        return []
    error = small_error(device)
    print(f"{CASE:34} error of a small case {error:.1e}{'' if error <= ERROR_LIMIT else '  WRONG'}", flush=True)
    if not error <= ERROR_LIMIT:
        return []
    case = Prefill.make(Shape(), 84 * 1024, 16 * 1024, device)
    baseline = timed(case.baseline())
    print(f"{CASE:34} {'FA3 BF16':16} {baseline * 1e3:8.2f} ms", flush=True)
    ours = timed(case.run(history.SCRATCH_ROWS)[0])
    print(f"{CASE:34} {'oscar':16} {ours * 1e3:8.2f} ms", flush=True)
    return [
        {
            "case": CASE,
            "metric": "time of one layer (history read back in tiles, FlashAttention 3 on them, merges)",
            "unit": "us",
            "ours": ours * 1e6,
            "baselines": {"FA3 BF16": baseline * 1e6},
            "ratio": ours / baseline,
            "must": 1.3,
            "aim": 1.05,
            "direction": "lower",
        }
    ]
