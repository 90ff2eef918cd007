"""Hugging Face models on a packed SRFT cache: Metal kernels on Apple GPUs, torch on the CPU."""

from oscar_serving.engines.apple.attention import use_packed_attention
from oscar_serving.engines.apple.cache import CacheBytes, SRFTInt4Cache, calibrate

__all__ = ["CacheBytes", "SRFTInt4Cache", "calibrate", "use_packed_attention"]
