"""Head sizes used in the wild, and what divides them."""

from __future__ import annotations

from hypothesis import strategies as st

HEAD_DIMS = (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 120, 128, 144, 160, 192, 224, 256, 288, 320, 384, 512)


def group_sizes(head_dim: int) -> list[int]:
    """Allowed group sizes of a head."""
    return [size for size in range(8, head_dim + 1, 8) if head_dim % size == 0]


#: (head size, group size)
GROUPS = [(d, g) for d in HEAD_DIMS for g in group_sizes(d)]
groups = st.sampled_from(GROUPS)
bits = st.sampled_from([2, 4])
scale_dtypes = st.sampled_from(["float16", "float8_e4m3"])
