"""Kernels on tensors and page tables; nothing here imports an engine."""
