"""Store and attend on a GPU: decode on packed pages, chunks on tiles of the cache that are read back.

A request with few new tokens goes to a decode kernel, which reads codes as they are. A longer chunk walks its keys in
tiles: a tile is read back into model space, as the window tier and as the INT2 tier have it, and a dense kernel takes
each key from the tier that the position rule gives the query. Scratch is bounded by :data:`KEY_TILE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import decode as triton_decode
from oscar_kernels.triton import gather
from oscar_kernels.triton import store as triton_store
from oscar_kernels.triton.config import decode_config
from oscar_serving.attention.base import NULL_PAGE, BatchTables, LayerCache
from oscar_serving.attention.history import Stores, Stretch
from oscar_serving.attention.tiles import aligned
from oscar_serving.attention.torch_backend import host_pages

#: New tokens of a request up to which a decode kernel serves it.
MAX_DECODE_TOKENS = 16
#: Keys of a tile; tiles begin at multiples of it.
KEY_TILE = 4096


@dataclass(frozen=True)
class Constants:
    """What the kernels need of a layer, worked out once."""

    stores: Stores
    windows: tuple[Tensor, Tensor]
    rotates: bool
    k_turn: Tensor
    v_back: Tensor
    sides: dict[torch.dtype, tuple[triton_store.Transform, triton_store.Transform]]

    @classmethod
    def of(cls, layer: LayerCache) -> Constants:
        """The layer's constants, from its cache of derived things."""
        if "triton" not in layer.derived:
            t, views = layer.transform, layer.layout.views(layer.pages)
            eye = torch.eye(t.head_dim, device=t.k_rotation.device)
            k_mean, v_mean = (mean.contiguous() if bool(mean.any()) else None for mean in (t.k_mean, t.v_mean))
            stores = Stores(
                (views.k_codes, views.k_meta, views.v_codes, views.v_meta), layer.windows, t.q_rotation.contiguous(),
                t.v_rotation.contiguous(), t.k_unit, t.v_unit, k_mean, v_mean, layer.layout.config, layer.spec,
            )  # fmt: skip
            layer.derived["triton"] = cls(
                stores,
                (layer.windows[:, 0], layer.windows[:, 1]),
                not all(torch.equal(r, eye.expand_as(r)) for r in (t.k_rotation, t.q_rotation, t.v_rotation)),
                cuda_decode.turn_matrix(t.q_rotation),
                cuda_decode.back_matrix(t.v_rotation),
                {},
            )
        constants: Constants = layer.derived["triton"]
        return constants

    def transforms(
        self, layer: LayerCache, dtype: torch.dtype
    ) -> tuple[triton_store.Transform, triton_store.Transform]:
        """Constants of the store kernel for K and V of type ``dtype``."""
        if dtype not in self.sides:
            t, s = layer.transform, self.stores
            rotations: list[Tensor | None] = [t.k_rotation.contiguous(), s.v_rotation]
            if not self.rotates:
                rotations = [None, None]
            elif dtype.itemsize == 2:
                rotations = [triton_store.split_rotation(r, dtype) for r in (t.k_rotation, s.v_rotation)]
            self.sides[dtype] = (
                triton_store.Transform(rotations[0], s.k_mean, t.k_shrink, t.k_unit),
                triton_store.Transform(rotations[1], s.v_mean, t.v_shrink, t.v_unit),
            )
        return self.sides[dtype]


@dataclass(frozen=True)
class Tile:
    """Keys of one request. ``own``: tokens of this step; ``near``, ``far``: which tiers its queries read."""

    start: int
    stop: int
    keys: Stretch
    own: bool
    near: bool
    far: bool


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one request: rows ``rows``, the first at position ``first``; ``raw`` keys are read as given."""

    request: int
    rows: slice
    first: int
    raw: Stretch | None
    tiles: list[Tile]
    query_start: Tensor
    context: Tensor


@dataclass(frozen=True)
class Step:
    """A batch as the kernels take it, for all layers of one kind."""

    slots: Tensor
    window_slots: Tensor
    lengths: Tensor
    decodes: int
    max_queries: int
    max_length: int
    chunks: list[Chunk]


class TritonBackend:
    """The backend of CUDA devices; on CPU tensors under ``TRITON_INTERPRET=1``, for tests."""

    name = "triton"

    def __init__(self) -> None:
        self._arrived: dict[torch.device, Tensor] = {}

    def store(self, layer: LayerCache, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        """Write new ``k, v`` ``[T, heads, d]`` (model space) to both stores."""
        step, constants = plan_step(layer, tables), Constants.of(layer)
        windows = triton_decode.Windows(*constants.windows, tables.window_table)
        k, v = _channels(k), _channels(v)
        triton_store.store(
            k, v, constants.stores.sections, windows, step.slots, step.window_slots,
            *constants.transforms(layer, k.dtype),
        )  # fmt: skip

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; see :class:`~oscar_serving.attention.base.AttentionBackend`."""
        step = plan_step(layer, tables)
        q = _channels(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.decodes:
            self._decode(layer, q, out, tables, step)
        if step.chunks:
            scratch = torch.empty(4, KEY_TILE, *k.shape[1:], dtype=q.dtype, device=q.device)
            for chunk in step.chunks:
                own = [x[chunk.rows].to(q.dtype).contiguous() for x in (k, v)]
                out[chunk.rows] = _attend_chunk(layer, q[chunk.rows], own[0], own[1], tables, chunk, scratch)
        return out

    def _decode(self, layer: LayerCache, q: Tensor, out: Tensor, tables: BatchTables, step: Step) -> None:
        constants, config, spec, transform = Constants.of(layer), layer.layout.config, layer.spec, layer.transform
        stores, device = constants.stores, q.device
        requests, heads, d, ratio = len(tables.lengths), transform.heads, q.shape[-1], q.shape[1] // transform.heads
        biased = stores.k_mean is not None and spec.softcap is not None
        cuda = _cuda_serves(layer, q)
        fused = cuda and q.dtype == torch.bfloat16 and not biased and q.stride(1) == d  # it rotates q itself
        rotated, bias = q, None
        if not fused:
            rotated = torch.empty(q.shape, dtype=torch.float32, device=device)
            bias = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if biased else None
            mean = stores.k_mean if biased else None
            triton_decode.rotate_query(q, stores.q_rotation, rotated, mean=mean, bias=bias)
        common: dict[str, Any] = {
            "out": out, "sink": config.sink, "recent": config.recent, "scale": spec.scale, "k_unit": stores.k_unit,
            "v_unit": stores.v_unit, "q_bias": bias, "v_mean": stores.v_mean, "sliding_window": spec.sliding_window,
            "softcap": spec.softcap,
        }  # fmt: skip
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        if cuda:
            geometry = cuda_decode.plan(
                requests, heads, ratio, d, config.page_size, max_queries=step.max_queries,
                max_length=step.max_length, sms=sms,
            )  # fmt: skip
            floats, counters = cuda_decode.workspace_size(requests, heads, d, geometry)
            cuda_decode.decode(
                rotated, stores.sections, constants.windows, tables.page_table, tables.window_table,
                tables.query_start, step.lengths, geometry=geometry, partial=torch.empty(floats, device=device),
                arrived=self._counters(counters, device), v_back=constants.v_back,
                k_turn=constants.k_turn if fused else None, **common,
            )  # fmt: skip
            return
        shape = decode_config(
            device, head_dim=d, k_bits=config.k_bits, v_bits=config.v_bits, ratio=ratio, page_size=config.page_size,
            rows=step.max_queries * ratio,
        )  # fmt: skip
        plan = triton_decode.plan(requests, heads, ratio, step.max_queries, step.max_length, sms, shape)
        workspace = torch.empty(triton_decode.workspace_size(requests, heads, d, plan), device=device)
        triton_decode.decode(
            rotated, stores.sections, triton_decode.Windows(*constants.windows, tables.window_table),
            tables.page_table, tables.query_start, step.lengths, geometry=plan, workspace=workspace,
            v_rotation=stores.v_rotation, **common,
        )  # fmt: skip

    def _counters(self, count: int, device: torch.device) -> Tensor:
        """int32 counters that are zero between launches."""
        if device not in self._arrived or self._arrived[device].numel() < count:
            self._arrived[device] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._arrived[device]


def _cuda_serves(layer: LayerCache, q: Tensor) -> bool:
    """Whether the CUDA decode kernel knows the layout and the types."""
    if not q.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    layout, config = layer.layout, layer.layout.config
    halves = q.dtype.itemsize == 2 and layer.windows.dtype.itemsize == 2
    args = layout.head_dim, config.k_bits, config.v_bits, layout.groups, config.page_size, config.page_size
    return halves and cuda_decode.supported(*args) is None


def plan_step(layer: LayerCache, tables: BatchTables) -> Step:
    """The batch's slots, decodes and chunks; worked out once for all layers alike."""
    config, spec = layer.layout.config, layer.spec
    key = f"triton {config.page_size} {config.sink} {config.recent} {layer.windows_only} {spec.sliding_window}"
    if key not in tables.derived:
        starts, lengths, raw_starts = tables.host
        device, size = tables.lengths.device, config.page_size
        window_rows = host_pages(tables)[1]
        decodes, chunks = [], []
        for b, (start, end) in enumerate(pairwise(starts)):
            first = lengths[b] - (end - start)
            if min(raw_starts[b], lengths[b]) < first:
                raise ValueError(
                    f"chunk_start={raw_starts[b]}: keys before position {first} are not among this step's "
                    f"{end - start} tokens"
                )
            if start == end:
                continue
            few = end - start <= MAX_DECODE_TOKENS and raw_starts[b] >= lengths[b] and not layer.windows_only
            # A decode kernel reads new tokens from the window store.
            if few and NULL_PAGE not in window_rows[b][first // size : -(-lengths[b] // size)]:
                decodes.append(b)
            else:
                chunks.append(_chunk(layer, tables, b))
        slots, window_slots = (torch.full((starts[-1],), -1, dtype=torch.int64, device=device) for _ in range(2))
        if starts[-1]:
            triton_store.slots(
                tables.query_start, tables.lengths, tables.page_table,
                triton_decode.Windows(layer.windows[:, 0], layer.windows[:, 1], tables.window_table),
                out=slots, window_out=window_slots, page_size=size, sink=config.sink,
                max_queries=max(end - start for start, end in pairwise(starts)),
            )  # fmt: skip
        if layer.windows_only:
            slots.fill_(-1)
        few_lengths = torch.zeros(len(lengths), dtype=torch.int32)
        few_lengths[decodes] = torch.tensor([lengths[b] for b in decodes], dtype=torch.int32)
        tables.derived[key] = Step(
            slots,
            window_slots,
            few_lengths.to(device),
            len(decodes),
            max((starts[b + 1] - starts[b] for b in decodes), default=1),
            # A bound that seldom changes: it decides how work is cut.
            1 << (max((lengths[b] for b in decodes), default=1) - 1).bit_length(),
            chunks,
        )
    step: Step = tables.derived[key]
    return step


def _chunk(layer: LayerCache, tables: BatchTables, b: int) -> Chunk:
    """Cut the keys of request ``b`` into tiles."""
    config, device = layer.layout.config, tables.lengths.device
    starts, lengths, raw_starts = tables.host
    n, length = starts[b + 1] - starts[b], lengths[b]
    first, raw_start = length - n, min(raw_starts[b], length)
    sliding = layer.spec.sliding_window
    low = 0 if sliding is None else max(0, first - sliding + 1)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def stretch(start: int, stop: int) -> Stretch:
        return Stretch(ints(start), ints(0, stop - start), stop - start)

    tiles = []
    for own, bounds in ((False, (low, first)), (True, (max(low, first), raw_start))):
        for start, stop in aligned(*bounds, KEY_TILE):
            # Without an INT2 tier the far way of reading is the window store's.
            near = own or (stop > first - config.recent + 1 and not layer.windows_only)
            # Own tokens are given: only those that some query reads from INT2 are read back.
            far = not own or (start < length - config.recent and not layer.windows_only)
            tiles.append(Tile(start, stop, stretch(start, stop), own, near, far))
    raw = stretch(raw_start, length) if raw_start < length else None
    return Chunk(b, slice(starts[b], starts[b + 1]), first, raw, tiles, ints(0, n), ints(first))


def _attend_chunk(
    layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables, chunk: Chunk, scratch: Tensor
) -> Tensor:
    """Attend for the new tokens of one request, float32 ``[n, query heads, d]``; ``k, v`` are theirs, as given.

    ``scratch`` is ``[4, rows, heads, d]``: K and V of a tile as the window tier and as the INT2 tier have it.
    """
    stores, config = Constants.of(layer).stores, layer.layout.config
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    rows = slice(chunk.request, chunk.request + 1)
    pages, window_pages = tables.page_table[rows], tables.window_table[rows]

    def attend(
        near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor] | None, keys: Stretch, recent: int | None
    ) -> None:
        gather.attend_near(
            q, near, far, chunk.query_start, chunk.context, keys.starts, keys.rows, q.shape[0], out=out, lse=lse,
            recent=recent, sink=config.sink, scale=layer.spec.scale, softcap=layer.spec.softcap, causal=True,
            sliding_window=layer.spec.sliding_window, resume=True,
        )  # fmt: skip

    for tile in chunk.tiles:
        near, far = (scratch[0], scratch[1]), (scratch[2], scratch[3])
        if tile.own:
            part = slice(tile.start - chunk.first, tile.stop - chunk.first)
            near = k[part], v[part]
        elif tile.near:
            stores.gather(tile.keys, pages, window_pages, *near, near=True)
        if tile.far:
            stores.gather(tile.keys, pages, window_pages, *far, near=False)
        if tile.near and tile.far:
            attend(near, far, tile.keys, config.recent)
        else:
            attend(near if tile.near else far, None, tile.keys, None)
    if chunk.raw is not None:
        offset = k.shape[0] - chunk.raw.longest
        attend((k[offset:], v[offset:]), None, chunk.raw, None)
    return out


def _channels(x: Tensor) -> Tensor:
    """``x`` in a type that the kernels know, with contiguous channels and heads."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        x = x.float()
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
