"""One layer's packed buffers: a transformers cache layer whose ``update`` hands out codes instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from oscar_serving.codec.signed import Signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig
from oscar_serving.config import ConfigError
from oscar_serving.engines.apple.compiled import CompiledRows, cpu_kernels
from oscar_serving.engines.apple.encode import encode_into

#: Rows of a new buffer, and least growth.
LEAST_ROWS = 256


@dataclass(frozen=True)
class PackedKeys:
    """What attention gets in place of key and value tensors: rows ``first … first + keys`` of a layer's buffers."""

    layer: PackedLayer
    first: int
    keys: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this attention function reads key tensors, and the cache is packed: "
            "call oscar_serving.engines.apple.use_packed_attention(model) before generate()"
        )


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Packed K and V of one attention layer, ``[batch, heads, capacity, row]``.

    Rows ``start … end`` of the buffers are live. A sliding layer forgets rows in front of its window when new ones
    come; what lies behind is moved to the front when the buffer is full, so that keys stay in order.

    Parameters
    ----------
    config
        Bits, groups and rotation.
    factors
        Per-channel factors of K and of V, ``[heads, d]``; ``None`` for ones.
    sliding_window
        Of a sliding layer.
    rows
        Rows to allocate at once; a buffer that is full doubles.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        config: SrftConfig,
        factors: tuple[Tensor, Tensor] | None = None,
        sliding_window: int | None = None,
        rows: int = LEAST_ROWS,
    ) -> None:
        super().__init__()
        self.config = config
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.start = self.end = self.seen = 0
        self.k_side: SideTransform
        self.v_side: SideTransform
        self._factors = factors
        self._rows = rows
        self._buffers: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._compiled: tuple[Tensor, CompiledRows] | None = None

    @property
    def k(self) -> Signed:
        """K codes and scales, the whole buffers."""
        assert self._buffers is not None
        return Signed(*self._buffers[:2])

    @property
    def v(self) -> Signed:
        """V codes and scales, the whole buffers."""
        assert self._buffers is not None
        return Signed(*self._buffers[2:])

    @property
    def compiled(self) -> CompiledRows | None:
        """The buffers as the compiled CPU kernels take them; ``None`` where they do not serve this layer."""
        codes, d = self.k.codes, self.k_side.rotation.shape[-1]
        if self._compiled is not None and self._compiled[0] is codes:
            return self._compiled[1]
        if codes.device.type != "cpu" or not CompiledRows.takes(d, self.config.groups(d)):
            return None
        kernels = cpu_kernels()
        if kernels is None:
            return None
        rows = CompiledRows(kernels, self.k, self.v, self.k_side, self.v_side)
        self._compiled = codes, rows  # made anew when the buffers are others
        return rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Build the transforms for the shape ``[batch, heads, tokens, d]`` of the first keys."""
        heads, d = key_states.shape[1], key_states.shape[-1]
        if value_states.shape[-1] != d:
            raise ConfigError(f"head sizes of K and V differ ({d}, {value_states.shape[-1]}): use DynamicCache")
        self.config.groups(d)
        matrix = self.config.matrix(d)
        ones = torch.ones(heads, d)
        k, v = self._factors or (ones, ones)
        self.k_side = SideTransform.build(matrix, k).to(key_states.device)
        self.v_side = SideTransform.build(matrix, v).to(key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PackedKeys, PackedKeys]:
        """Encode new rows and hand out the rows that attention may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        if self.sliding_window is not None:
            self.start = max(self.start, self.end - self.sliding_window + 1)
        self._make_room(key_states, tokens)
        if compiled := self.compiled:
            compiled.store(key_states, value_states, self.end)
        else:
            encode_into(self.k_side, key_states, self.k, self.end, self.config.k_bits, self.config)
            encode_into(self.v_side, value_states, self.v, self.end, self.config.v_bits, self.config)
        self.end += tokens
        self.seen += tokens
        handle = PackedKeys(self, self.start, self.end - self.start)
        return handle, handle

    def _make_room(self, states: Tensor, tokens: int) -> None:
        batch, heads, _, d = states.shape
        if self._buffers is not None and self._buffers[0].shape[0] != batch:
            if self.end:
                raise ValueError(f"batch of {batch} on a cache of {self._buffers[0].shape[0]}: reset() the cache first")
            self._buffers = None
        live = self.end - self.start
        needed = live + tokens
        if self._buffers is None:
            self._buffers = self._allocate(batch, heads, max(self._rows, needed), d, states.device)
        capacity = self._buffers[0].shape[2]
        if self.end + tokens <= capacity:
            return
        if needed <= capacity and live <= self.start:  # old and new place do not overlap
            for buffer in self._buffers:
                buffer[:, :, :live] = buffer[:, :, self.start : self.end]
        else:
            grown = self._allocate(batch, heads, max(needed + LEAST_ROWS, 2 * live), d, states.device)
            for old, new in zip(self._buffers, grown, strict=True):
                new[:, :, :live] = old[:, :, self.start : self.end]
            self._buffers = grown
        self.start, self.end = 0, live

    def _allocate(
        self, batch: int, heads: int, rows: int, d: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        groups, shape = self.config.groups(d), (batch, heads, rows)
        k_codes, v_codes = (
            torch.empty(*shape, d * bits // 8, dtype=torch.uint8, device=device)
            for bits in (self.config.k_bits, self.config.v_bits)
        )
        k_scales, v_scales = (torch.empty(*shape, groups, dtype=torch.float16, device=device) for _ in range(2))
        return k_codes, k_scales, v_codes, v_scales

    def get_seq_length(self) -> int:
        """Tokens seen, the forgotten ones of a sliding layer included."""
        return self.seen

    def get_max_length(self) -> int:
        """The window of a sliding layer, else -1."""
        return self.sliding_window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next ``update`` of ``query_length`` tokens hands out, and the position of the first."""
        if self.sliding_window is None:
            return self.seen + query_length, 0
        kept = min(self.end - self.start, self.sliding_window - 1)
        return kept + query_length, self.seen - kept

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (a negative number, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a negative number, the tokens to remove")
        count = -tokens_to_remove
        if count > self.seen:
            raise ValueError(f"crop({tokens_to_remove}): the layer holds {self.seen} tokens")
        if self.sliding_window is not None:
            needed = min(self.seen - count, self.sliding_window - 1)
            if self.end - count - self.start < needed:
                raise RuntimeError(
                    f"crop({tokens_to_remove}): a sliding layer can take back the tokens of its last call only"
                )
        self.end -= count
        self.seen -= count

    def reset(self) -> None:
        """Forget everything; buffers stay."""
        self.start = self.end = self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order (beam search)."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self._buffers is not None:
            batch = torch.arange(self._buffers[0].shape[0], device=self.device)
            self._select(batch.repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        if self._buffers is not None:
            k_codes, k_scales, v_codes, v_scales = (b[rows.to(b.device)] for b in self._buffers)
            self._buffers = k_codes, k_scales, v_codes, v_scales

    def offload(self) -> None:
        """Not supported."""
        raise ConfigError("offloading a packed cache is not supported: use DynamicCache(offloading=True)")

    prefetch = offload

    @property
    def live_bytes(self) -> int:
        """Bytes of the live rows, scales included."""
        return 0 if self._buffers is None else sum(b[:, :, self.start : self.end].nbytes for b in self._buffers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self._buffers is None else sum(b.nbytes for b in self._buffers)
