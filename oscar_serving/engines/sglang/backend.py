"""The attention backend: tables of a step, and the calls of a layer's kernels."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from oscar_kernels.triton.rows import Tables
from oscar_serving.attention import AttentionSpec
from oscar_serving.config import ConfigError
from oscar_serving.engines.sglang.geometry import LayerShape, Scratch
from oscar_serving.engines.sglang.layer import Prefill
from oscar_serving.engines.sglang.pool import OscarKVPool
from oscar_serving.engines.sglang.start import announce
from oscar_serving.engines.sglang.step import empty_tables, fill_decode, prefill_step


class OscarAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over INT2 pages and windows. Decode tables have one place for good: captured graphs read them."""

    needs_cpu_seq_lens = False
    extend_dummy_seqs_capped_by_req_pool = True
    forward_metadata: Any  #: Tables of a decode step, else Prefill

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, OscarKVPool):
            raise ConfigError(
                "attention backend oscar: it reads an OSCAR cache only; set --kv-cache-dtype oscar_int2 or oscar_k4v2"
            )
        model, ranks = runner.model_config, get_parallel().attn_tp_size
        self.pool, self.config = pool, pool.calibration.config
        self.req_to_token_pool = runner.req_to_token_pool
        self.req_to_token_pool.oscar_rows = pool.rows
        if self.req_to_token_pool.size > pool.running:
            raise RuntimeError(f"oscar: {self.req_to_token_pool.size} rows, windows for {pool.running}")
        self.device = torch.device(runner.device)
        self.kind, layout = runner.dtype, pool.layers[0].layout
        self.shape = LayerShape(
            model.num_attention_heads // ranks, pool.head_num, pool.head_dim, self.config.k_bits, self.config.v_bits,
            layout.groups,
        )  # fmt: skip
        self.max_length = model.context_len
        self.capacity = 0
        self.reserve(self.req_to_token_pool.size)
        announce(pool, self.shape, self.device)

    def reserve(self, requests: int) -> None:
        """Memory of decode batches of up to ``requests``."""
        if requests <= self.capacity:
            return
        self.capacity = requests
        self.scratch = Scratch.reserve(
            [self.shape], requests, self.max_length, self.config.recent, self.kind, self.device
        )
        self.decode_tables = empty_tables(requests, self.max_length, self.device)
        self.query_start = torch.arange(requests + 1, dtype=torch.int32, device=self.device)

    # Tables of a step -------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured graphs read."""
        self.reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding requests; the tables make it 0."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Tables of an eager step."""
        if forward_batch.forward_mode.is_decode_or_idle():
            self.init_forward_metadata_out_graph(forward_batch)
            return
        self._refuse_mode(forward_batch)
        self.forward_metadata = self._prefill(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Tables of a decode step, into the place that the graph reads."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            self._refuse_mode(forward_batch)
            raise NotImplementedError("oscar: prefill runs outside CUDA graphs")
        self.pool.flush_rows()
        n = forward_batch.req_pool_indices.shape[0]
        self.forward_metadata = step = Tables(*(x[:n] for x in self.decode_tables))
        if n:
            fill_decode(
                self.pool.row_layout, self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices,
                forward_batch.seq_lens, forward_batch.out_cache_loc, step,
            )  # fmt: skip

    def _refuse_mode(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if not (mode.is_extend_without_speculative() if hasattr(mode, "is_extend_without_speculative") else True):
            raise NotImplementedError(f"oscar: forward mode {mode.name} is not supported")

    def _prefill(self, forward_batch: Any) -> Prefill:
        self.pool.flush_rows()
        queries, before = list(forward_batch.extend_seq_lens_cpu), list(forward_batch.extend_prefix_lens_cpu)
        return prefill_step(
            self.pool.row_layout, self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices[: len(queries)],
            queries, before, forward_batch.out_cache_loc[: sum(queries)], self.config, self.scratch.rows,
        )  # fmt: skip

    # Attention --------------------------------------------------------------------------------------------------------

    def _spec(self, layer: Any, kwargs: dict[str, Any]) -> AttentionSpec:
        for refused, what in (
            (layer.sliding_window_size not in (None, -1), "a sliding window is"),
            (layer.is_cross_attention or layer.attn_type != AttentionType.DECODER, "attention that is not causal is"),
            (layer.xai_temperature_len > 0, "a temperature by position is"),
            (any(v is not None for v in kwargs.values()), f"attention options {', '.join(sorted(kwargs))} are"),
        ):
            if refused:
                raise NotImplementedError(f"oscar: {what} not supported; use another kv-cache dtype")
        return AttentionSpec(float(layer.scaling), layer.logit_cap or None)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attend for one new token a request."""
        spec, step = self._spec(layer, kwargs), self.forward_metadata
        mine = self.pool.layers[layer.layer_id - self.pool.start_layer]
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if save_kv_cache:
            mine.store(
                k.view(-1, layer.tp_k_head_num, layer.head_dim), v.view(-1, layer.tp_v_head_num, layer.head_dim),
                step.slots, step.window_slots,
            )  # fmt: skip
        mine.decode(q, step, self.query_start[: q.shape[0] + 1], out, spec, self.shape, self.scratch)
        return out.flatten(1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attend for the new tokens of each request; rows after them are padding."""
        spec, step = self._spec(layer, kwargs), self.forward_metadata
        if not save_kv_cache or k is None:
            raise NotImplementedError("oscar: sharing another layer's cache is not supported; use another dtype")
        mine = self.pool.layers[layer.layer_id - self.pool.start_layer]
        n = step.slots.shape[0]
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.head_dim)[:n]
        v = v.view(-1, layer.tp_v_head_num, layer.head_dim)[:n]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        mine.prefill(q[:n], k, v, step, out[:n], spec, self.scratch)
        return out.flatten(1)
