"""OSCAR Serving: 2-bit KV caches for vLLM, SGLang and Hugging Face models (arXiv 2605.17757)."""

from oscar_serving.version import __version__

__all__ = ["__version__"]
