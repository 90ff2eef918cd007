"""Triton kernels: store, decode and prefill over the mixed-precision paged cache. Tensors in, tensors out."""

from oscar_kernels.triton.interpret import install

install()
