"""Attention over the mixed-precision cache: the float64 reference and the seam that picks a kernel for a device."""

from oscar_serving.attention.base import AttentionBackend, BatchTables, LayerCache
from oscar_serving.attention.select import select_backend
from oscar_serving.attention.spec import AttentionSpec

__all__ = ["AttentionBackend", "AttentionSpec", "BatchTables", "LayerCache", "select_backend"]
