"""``oscar plan``: how many tokens and requests fit in a memory, in BF16, FP8 and INT2.

Every byte comes from :class:`~oscar_serving.codec.PageLayout` and every window page from the position rule, which the
allocator uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from oscar_serving.attention.base import EVERY_POSITION
from oscar_serving.cache.rule import window_pages
from oscar_serving.calibration.architecture import Architecture
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.ranks import can_share

#: How layers with a sliding window are stored. ``same``: like the others, as the embedded engine does. ``bounded``:
#: unquantized, and only what can still be seen, as vLLM does.
Sliding = Literal["same", "bounded"]
CONTEXTS = (4096, 8192, 32768, 131072)
_NULL_PAGES = 1


class PlanError(ValueError):
    """Nothing can be planned for this model or memory; the message says why."""


@dataclass(frozen=True)
class CachePlan:
    """What fits with one kind of cache.

    Attributes
    ----------
    name
        ``BF16``, ``FP8``, or the bits of K and V.
    bits_per_element
        Stored bits of one element of K or V outside the windows, scales included.
    bytes_per_token
        Over all layers that grow with the context, scales included.
    bytes_per_request
        What a request takes whatever its length, once it is longer than the windows: sink and recent tokens, and layers
        with a sliding window where they are bounded.
    tokens
        Tokens that fit as one request.
    requests
        Context length → concurrent requests of that length.
    """

    name: str
    bits_per_element: float
    bytes_per_token: float
    bytes_per_request: int
    tokens: int
    requests: dict[int, int]


@dataclass(frozen=True)
class Plan:
    """Plans of the kinds of cache, BF16 first."""

    model: str
    memory_bytes: int
    max_model_len: int | None
    layers: int
    sliding_layers: int
    kv_heads: int
    head_dim: int
    config: OscarConfig
    caches: list[CachePlan]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    def ratio(self, cache: CachePlan) -> float:
        """How many times fewer bytes a token takes than in BF16."""
        return self.caches[0].bytes_per_token / cache.bytes_per_token


@dataclass(frozen=True)
class _Shape:
    """Attention layers: how many grow with the context, how many are bounded, and how far those see."""

    growing: int
    bounded: int
    window: int
    heads: int
    head_dim: int


def plan(
    model: Any,
    memory_bytes: int,
    *,
    config: OscarConfig | None = None,
    contexts: Sequence[int] = CONTEXTS,
    sliding: Sliding = "same",
    tensor_parallel: int = 1,
) -> Plan:
    """Plan the cache of a model.

    Parameters
    ----------
    model
        Path of a ``config.json`` or of its folder, or a Hugging Face configuration. No weights are needed.
    memory_bytes
        Memory for the cache on one device, beside weights and activations.
    config
        Cache layout and windows; K and V bits are shown as given and as K4 V2.
    contexts
        Context lengths for which to count requests; those beyond the model's limit are left out.
    sliding
        See :data:`Sliding`.
    tensor_parallel
        Devices that share the KV heads (each holds at least one).

    Raises
    ------
    PlanError, ConfigError
        What is wrong.
    """
    hf_config, name = _read(model)
    architecture = Architecture.of(hf_config)
    config = config or default_config(architecture.head_dim)
    if memory_bytes < 1 or tensor_parallel < 1:
        raise PlanError(f"memory_bytes={memory_bytes}, tensor_parallel={tensor_parallel}: both must be at least 1")
    if not can_share(architecture.kv_heads, tensor_parallel):
        raise PlanError(
            f"tensor_parallel={tensor_parallel}: {architecture.kv_heads} KV heads are shared by a divisor of that many "
            "devices, or repeated on a multiple"
        )
    cached = architecture.cached_layers()
    if not cached:
        raise PlanError(f"{name}: no layer has a KV cache, so there is nothing to plan")
    kinds = architecture.layer_types or (
        ("sliding_attention" if architecture.sliding_window else "full_attention",) * architecture.layers
    )
    slides = [i for i in cached if kinds[i] == "sliding_attention" and architecture.sliding_window]
    bounded = len(slides) if sliding == "bounded" else 0
    shape = _Shape(
        len(cached) - bounded,
        bounded,
        architecture.sliding_window or 0,
        max(1, architecture.kv_heads // tensor_parallel),
        architecture.head_dim,
    )
    limit = getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = [c for c in contexts if limit is None or c <= limit] or [int(limit or contexts[0])]
    wide = config.with_(k_bits=4, v_bits=2)
    caches = [
        _plain("BF16", shape, config, memory_bytes, lengths, torch.bfloat16),
        _plain("FP8", shape, config, memory_bytes, lengths, torch.float8_e4m3fn),
        _oscar(shape, config, memory_bytes, lengths),
    ]
    if wide != config:
        caches.append(_oscar(shape, wide, memory_bytes, lengths))
    return Plan(
        name,
        memory_bytes,
        int(limit) if limit else None,
        len(cached),
        len(slides),
        architecture.kv_heads,
        architecture.head_dim,
        config,
        caches,
    )


def default_config(head_dim: int) -> OscarConfig:
    """The layout that calibration chooses for a head size."""
    from oscar_serving.calibration.recipe import default_config as chosen

    return chosen(head_dim)


def window_bytes(layout: PageLayout, heads: int, length: int) -> int:
    """Bytes of the window pages of a request of ``length`` tokens in one layer, the page being filled included."""
    config = layout.config
    pages = max(
        sum(map(len, window_pages(at, sink=config.sink, recent=config.recent, page_size=config.page_size)))
        for at in range(max(0, length - config.page_size), length + 1)
    )
    return pages * layout.window_page_bytes(heads)


def _oscar(shape: _Shape, config: OscarConfig, memory: int, lengths: Sequence[int]) -> CachePlan:
    layout = PageLayout(shape.head_dim, config)
    page = shape.growing * layout.page_bytes(shape.heads)
    null = shape.growing * (layout.page_bytes(shape.heads) + layout.window_page_bytes(shape.heads))
    longest = config.sink + config.recent + 2 * config.page_size

    def windows(length: int) -> int:
        return shape.growing * window_bytes(layout, shape.heads, min(length, longest))

    fixed = windows(longest) + _bounded_bytes(shape, config, torch.bfloat16, longest + shape.window)
    free = memory - null

    def request(length: int) -> int:
        pages = -(-length // config.page_size)
        return pages * page + windows(length) + _bounded_bytes(shape, config, torch.bfloat16, length)

    return CachePlan(
        f"K{config.k_bits} V{config.v_bits}",
        layout.bits_per_element,
        shape.growing * layout.bytes_per_token(shape.heads),
        fixed,
        max(0, free - fixed) // page * config.page_size if page else 0,
        {length: max(0, free) // request(length) for length in lengths},
    )


def _plain(
    name: str, shape: _Shape, config: OscarConfig, memory: int, lengths: Sequence[int], dtype: torch.dtype
) -> CachePlan:
    page = shape.growing * _plain_page(shape, config, dtype)
    null = (shape.growing + shape.bounded) * _plain_page(shape, config, dtype)
    free = max(0, memory - null)
    fixed = _bounded_bytes(shape, config, dtype, shape.window + config.page_size)

    def request(length: int) -> int:
        return -(-length // config.page_size) * page + _bounded_bytes(shape, config, dtype, length)

    return CachePlan(
        name,
        8.0 * dtype.itemsize,
        page / config.page_size,
        fixed,
        max(0, free - fixed) // page * config.page_size if page else 0,
        {length: free // request(length) for length in lengths},
    )


def _plain_page(shape: _Shape, config: OscarConfig, dtype: torch.dtype) -> int:
    """Bytes of a page of an unquantized cache in one layer, as the layout of windows gives them."""
    layout = PageLayout(shape.head_dim, config.with_(window_dtype="bfloat16", sink=EVERY_POSITION))
    return layout.window_page_bytes(shape.heads) * dtype.itemsize // torch.bfloat16.itemsize


def _bounded_bytes(shape: _Shape, config: OscarConfig, dtype: torch.dtype, length: int) -> int:
    """Bytes of the layers of which only the last ``window`` tokens are kept."""
    pages = min(-(-length // config.page_size), -(-shape.window // config.page_size) + 1)
    return shape.bounded * pages * _plain_page(shape, config, dtype)


def _read(model: Any) -> tuple[Any, str]:
    if not isinstance(model, (str, Path)):
        return model, str(getattr(model, "_name_or_path", "") or getattr(model, "model_type", "model"))
    from transformers import AutoConfig

    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"{file}: there is no such config.json")
    try:
        hf_config = AutoConfig.from_pretrained(file)
        Architecture.of(hf_config)
    except (ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        raise PlanError(f"{file}: not the configuration of a known language model: {error}") from error
    return hf_config, file.resolve().parent.name
