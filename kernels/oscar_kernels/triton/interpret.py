"""Run the kernels under the Triton interpreter (``TRITON_INTERPRET=1``).

Three gaps of Triton 3.6's interpreter are closed when :mod:`oscar_kernels.triton` is imported; a compiled run is not
touched. Scalars are arrays of one element, which NumPy 2.4 no longer converts to a Python integer, so that
``range(tensor)`` fails. bfloat16 is kept as its bits, which ``dot`` multiplies as if they were numbers. And float32 is
cut off, not rounded, to bfloat16.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Patch the interpreter, once; does nothing in a compiled run."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "oscar", False):
        return
    interpreter.oscar = True
    original = interpreter._patch_lang_tensor
    dot = interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            nan = np.uint16(0x7FC0)
            return interpreter.TensorHandle(np.where(np.isnan(src.data), nan, nearest), tl.bfloat16)
        return cast(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = rounded
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = widened
