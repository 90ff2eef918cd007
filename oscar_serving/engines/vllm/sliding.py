"""FlashAttention for the sliding-window layers that stay unquantized beside an OSCAR cache."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder


class UnscheduledBuilder(FlashAttentionMetadataBuilder):
    """Lets the kernel schedule itself: vLLM's ahead-of-time schedule takes any quantized cache dtype for FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False


class SlidingFlashBackend(FlashAttentionBackend):
    """FlashAttention with :class:`UnscheduledBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return UnscheduledBuilder
