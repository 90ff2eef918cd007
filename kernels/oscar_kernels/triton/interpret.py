"""Run the kernels under the Triton interpreter (``TRITON_INTERPRET=1``).

Two gaps of Triton 3.6's interpreter are closed when :mod:`oscar_kernels.triton` is imported; a compiled run is not
touched. Scalars are arrays of one element, which NumPy 2.4 no longer converts to a Python integer, so that
``range(tensor)`` fails. And bfloat16 is kept as its bits, which ``dot`` multiplies as if they were numbers.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Patch the interpreter, once; does nothing in a compiled run."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
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

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = widened
