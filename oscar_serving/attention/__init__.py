"""Attention over the mixed-precision cache: the float64 reference and the seam that picks a kernel for a device."""
