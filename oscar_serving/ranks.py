"""How tensor-parallel ranks share KV heads, in every engine and in the plan."""

from __future__ import annotations


def can_share(heads: int, ranks: int) -> bool:
    """Whether each of ``ranks`` gets as many of ``heads`` KV heads, or each head as many ranks."""
    return heads % ranks == 0 or ranks % heads == 0


def rank_heads(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last + 1 KV head of a rank; with more ranks than heads, heads are replicated."""
    if total >= ranks:
        each = total // ranks
        return rank * each, (rank + 1) * each
    head = rank // (ranks // total)
    return head, head + 1
