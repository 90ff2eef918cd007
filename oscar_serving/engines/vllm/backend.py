"""Attention backends of the two stores: what vLLM asks before a layer runs, and the metadata of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_layout import KVCacheLayout

from oscar_serving.attention.history import Group, plan_groups
from oscar_serving.config import KV_CACHE_DTYPES
from oscar_serving.engines.vllm.options import WINDOW_BLOCK
from oscar_serving.engines.vllm.scratch import Scratch


class OscarBackend(AttentionBackend):
    """Backend of layers whose K and V are in the INT2 store."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        from oscar_serving.engines.vllm.impl import OscarImpl

        return OscarImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(WINDOW_BLOCK)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block-outermost: the pages of all layers lie side by side, so the two stores share one pool of blocks."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in KV_CACHE_DTYPES

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def refusal(cls, asked: Any) -> str | None:
        """Why a layer with this selector configuration cannot be served, or ``None``."""
        refusals = (
            (asked.use_mla, "multi-head latent attention is not supported"),
            (asked.use_sparse, "sparse attention is not supported"),
            (
                not cls.supports_head_size(asked.head_size),
                f"head size {asked.head_size} is not a multiple of 16 up to 256",
            ),
            (asked.dtype not in cls.supported_dtypes, f"model type {asked.dtype} is not bfloat16 or float16"),
            (asked.attn_type != AttentionType.DECODER, f"{asked.attn_type} attention is not supported"),
            (asked.use_mm_prefix, "bidirectional attention of image tokens is not supported"),
            (asked.use_non_causal, "non-causal attention is not supported"),
            (asked.use_kv_connector, "KV connectors are not supported"),
            (asked.use_dcp or asked.use_pcp, "context parallelism is not supported"),
            (asked.use_rswa, "reference sliding-window attention is not supported"),
            (asked.use_batch_invariant, "VLLM_BATCH_INVARIANT is not supported"),
        )
        return next((why for refused, why in refusals if refused), None)


class OscarWindowBackend(OscarBackend):
    """Backend of the window stores: it only hands their block tables and slots to the attention layers."""

    @staticmethod
    def get_builder_cls() -> Any:
        return WindowMetadataBuilder


@dataclass
class WindowMetadata(AttentionMetadata):
    """Where the window store's tokens are.

    Attributes
    ----------
    block_table
        int32 ``[requests, blocks]``; 0 where there is no block.
    slots
        int64 ``[tokens]``: block * 16 + offset of each new token, -1 for padding and for tokens without a block.
    """

    block_table: Tensor
    slots: Tensor


class WindowMetadataBuilder(AttentionMetadataBuilder[WindowMetadata]):
    """Builds :class:`WindowMetadata`."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = max(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.scheduler_config.max_num_seqs)
        # One place for good: captured graphs read it.
        self.slots = torch.full((2 * most,), -1, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> WindowMetadata:
        given = common_attn_metadata.slot_mapping
        slots = self.slots[: given.shape[0]]
        # Tokens that no later query reads unquantized have the null block: vLLM would write them all there.
        slots.copy_(given).masked_fill_(given < WINDOW_BLOCK, -1)
        return WindowMetadata(common_attn_metadata.block_table_tensor, slots)


@dataclass
class PrefillMetadata:
    """The requests after the decodes, ``P`` of them.

    Attributes
    ----------
    first
        Index of the first such request in the batch.
    query_start
        int32 ``[P + 1]``, counted from the first prefill token.
    lengths
        int32 ``[P]``: tokens, those of this step included.
    longest_query
        Most new tokens of a request.
    groups
        Stretches of the history that the step reads.
    """

    first: int
    query_start: Tensor
    lengths: Tensor
    longest_query: int
    groups: list[Group]


@dataclass
class OscarMetadata(AttentionMetadata):
    """One step. Decodes come first: ``num_decodes`` requests with at most ``max_decode_query`` new tokens each."""

    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_decode_query: int
    query_start: Tensor
    lengths: Tensor
    block_table: Tensor
    prefill: PrefillMetadata | None
    scratch: Scratch


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Builds :class:`OscarMetadata` and owns the scratch memory of the kernels."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        assert self.reorder_batch_threshold is not None
        config = layers[0].impl.cached.layout.config
        self.recent, self.rule = config.recent, config.prefill_mode == "rule"
        self.scratch = Scratch.reserve(
            [layer.impl.shape for layer in layers], vllm_config, self.reorder_batch_threshold, self.recent, device
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OscarMetadata:
        common = common_attn_metadata
        assert self.reorder_batch_threshold is not None
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        return OscarMetadata(
            num_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            max_decode_query=self.reorder_batch_threshold if prefills else common.max_query_len,
            query_start=common.query_start_loc,
            lengths=common.seq_lens,
            block_table=common.block_table_tensor,
            prefill=self._prefill(common, decodes, decode_tokens) if prefills else None,
            scratch=self.scratch,
        )

    def _prefill(self, common: CommonAttentionMetadata, first: int, tokens: int) -> PrefillMetadata:
        query_start = common.query_start_loc[first:] - tokens
        lengths = common.seq_lens[first:]
        queries = common.query_start_loc_cpu[first + 1 :] - common.query_start_loc_cpu[first:-1]
        host_lengths = common.seq_lens_cpu_upper_bound  # exact for prefills
        before = (common.seq_lens.cpu() if host_lengths is None else host_lengths)[first:] - queries
        host_queries = queries.tolist()
        groups = plan_groups(
            query_start,
            lengths - (query_start[1:] - query_start[:-1]),
            host_queries,
            before.clamp(min=0).tolist(),
            recent=self.recent,
            rule=self.rule,
            rows=self.scratch.rows,
        )
        return PrefillMetadata(first, query_start, lengths, max(host_queries), groups)
