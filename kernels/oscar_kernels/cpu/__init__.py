"""Compiled CPU kernels: built with the system's C++ compiler on first use, called through ctypes without the GIL."""

from oscar_kernels.cpu.build import BuildError
from oscar_kernels.cpu.cache import Batch, Kernels, Layer

__all__ = ["Batch", "BuildError", "Kernels", "Layer"]
