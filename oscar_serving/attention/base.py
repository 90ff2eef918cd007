"""The seam between engines and attention kernels: one layer's tensors, one batch's tables, one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.codec import PageLayout
from oscar_serving.config import ConfigError, OscarConfig, WindowDtype
from oscar_serving.rotation import LayerTransform

#: Page 0 of either store is never allocated: a table entry of 0 means "no page".
NULL_PAGE = 0
#: ``sink`` of a cache without an INT2 tier: every position is read from the window store.
EVERY_POSITION = 2**31 - 1


@dataclass(frozen=True)
class LayerCache:
    """Tensors of one attention layer.

    Attributes
    ----------
    pages
        INT2 store, uint8 ``[pages, heads, layout.head_bytes]``; every cached token is here.
    windows
        Sink and recent tokens, ``window_dtype`` ``[window pages, 2, heads, page_size, d]`` (K, V), in cache space
        (rotated, mean subtracted) like the INT2 store.

    A cache whose ``pages`` has the null page alone has no INT2 tier (:meth:`allocate_plain`): page tables are ignored,
    and every token needs a window page.
    """

    pages: Tensor
    windows: Tensor
    layout: PageLayout
    transform: LayerTransform
    spec: AttentionSpec

    def __post_init__(self) -> None:
        config = self.layout.config
        if config.levels != "affine":
            raise ConfigError(f"levels={config.levels!r}: for evaluation only; a cache that is served needs 'affine'")
        if self.windows_only and config.sink != EVERY_POSITION:
            raise ConfigError(f"pages=1: only the null page, so sink={config.sink} must be {EVERY_POSITION}")

    @property
    def windows_only(self) -> bool:
        """Whether there is no INT2 tier."""
        return self.pages.shape[0] == 1

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Where a backend keeps what it works out from the layer once."""
        return {}

    @classmethod
    def allocate(
        cls,
        layout: PageLayout,
        transform: LayerTransform,
        spec: AttentionSpec,
        *,
        pages: int,
        window_pages: int,
        device: torch.device | str = "cpu",
    ) -> LayerCache:
        """Zeroed stores with ``pages`` and ``window_pages`` pages, the null page included."""
        heads, d, tokens = transform.heads, layout.head_dim, layout.config.page_size
        dtype = getattr(torch, layout.config.window_dtype)
        return cls(
            torch.zeros(pages, heads, layout.head_bytes, dtype=torch.uint8, device=device),
            torch.zeros(window_pages, 2, heads, tokens, d, dtype=dtype, device=device),
            layout,
            transform.to(device),
            spec,
        )

    @classmethod
    def allocate_plain(
        cls,
        heads: int,
        head_dim: int,
        spec: AttentionSpec,
        *,
        window_pages: int,
        page_size: int = 32,
        dtype: WindowDtype = "bfloat16",
        device: torch.device | str = "cpu",
    ) -> LayerCache:
        """The unquantized baseline: a paged cache in ``dtype``, neither rotated nor rounded to codes.

        It is the same cache with an endless sink: each token goes to the window store only, K and V as they are.
        """
        config = OscarConfig(sink=EVERY_POSITION, page_size=page_size, window_dtype=dtype, rotation="none")
        transform = LayerTransform.plain(heads, head_dim, rotate=False)
        return cls.allocate(
            PageLayout(head_dim, config), transform, spec, pages=1, window_pages=window_pages, device=device
        )


@dataclass(frozen=True)
class BatchTables:
    """Where the tokens of a ragged batch lie. ``B`` requests, ``T`` new tokens in all.

    Attributes
    ----------
    query_start
        int32 ``[B + 1]``: new tokens of request ``b`` are rows ``query_start[b] … query_start[b + 1]``.
    lengths
        int32 ``[B]``: tokens of the request after this step, the new ones included. Row ``i`` of request ``b`` has
        position ``lengths[b] - query_start[b + 1] + i``.
    chunk_start
        int32 ``[B]``: keys at or after this position are read raw, as given in this step (prefill mode ``raw``);
        equal to ``lengths[b]`` where none are (mode ``rule``, and decode steps in either mode).
    page_table, window_table
        int32 ``[B, max pages]``: page of position ``p`` is entry ``p // page_size``; 0 where there is no page. A token
        whose entry is 0 is not written to that store. A token of an earlier step whose window entry is 0 is read from
        INT2; a token of this step is read unquantized where the position rule says so, whatever its window entry.
    host
        The same first three as Python lists, so that CPU code need not read tensors back.
    """

    query_start: Tensor
    lengths: Tensor
    chunk_start: Tensor
    page_table: Tensor
    window_table: Tensor
    host: tuple[list[int], list[int], list[int]]

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Where a backend keeps what it works out from the tables, once for all layers of a step."""
        return {}


class AttentionBackend(Protocol):
    """A device's implementation of store and attend.

    Held against :func:`~oscar_serving.attention.reference.reference_attention`.
    """

    name: str

    def store(self, layer: LayerCache, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        """Write new ``k, v`` ``[T, heads, d]`` (model space) to both stores."""

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; ``k, v`` as given to :meth:`store`, which has run.

        Returns ``[T, query heads, d]`` in the type of ``q``.
        """
