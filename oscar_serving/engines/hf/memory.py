"""From a number of bytes to the pages of both tiers, their tensors and the pool that hands them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_serving.attention.base import EVERY_POSITION, LayerCache
from oscar_serving.cache.pool import CachePool
from oscar_serving.calibration import Artifact, ArtifactError, find_artifact
from oscar_serving.codec import PageLayout
from oscar_serving.codec.srft_int4 import served_config
from oscar_serving.config import KV_CACHE_DTYPES, ConfigError, OscarConfig
from oscar_serving.engines.apple.paged import SrftLayer
from oscar_serving.engines.hf.model import LoadedModel
from oscar_serving.engines.hf.options import BF16, EngineOptions, EngineStats, TierStats
from oscar_serving.rotation import LayerTransform

#: Share of the memory beyond what is needed that goes to the windows of finished prompts, at most one for each request.
CACHED_WINDOW_SHARE = 0.25


@dataclass(frozen=True)
class Sizes:
    """Bytes over all layers: of a page of each tier, and of a token in BF16."""

    page: int
    window_page: int
    bf16_token: int


@dataclass(frozen=True)
class CacheStores:
    """Both tiers of all layers, and the pool over them.

    In the plain BF16 baseline (``plain``) there is no INT2 tier: each token is in the window store only. With the SRFT
    codec there is no window store (a window page takes 0 bytes), and ``config`` says no more than the page size.
    """

    config: OscarConfig
    layers: tuple[LayerCache, ...] | tuple[SrftLayer, ...]
    pool: CachePool
    sizes: Sizes
    plain: bool
    pages: int
    window_pages: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit."""
        return (self.pages - 1) * self.config.page_size

    def stats(self, **counts: int) -> EngineStats:
        """Occupancy beside the engine's ``counts``."""
        pool, sizes = self.pool.stats(), self.sizes
        windows = TierStats(0, 0, 0, 0)
        if sizes.window_page:
            tier = pool.windows
            windows = TierStats(tier.total, tier.used, tier.cached, self.window_pages * sizes.window_page)
        quantized = TierStats(0, 0, 0, 0)
        if not self.plain:
            tier = pool.quantized
            quantized = TierStats(tier.total, tier.used, tier.cached, self.pages * sizes.page)
        taken = (quantized.used + quantized.cached) * sizes.page + (windows.used + windows.cached) * sizes.window_page
        tokens = (pool.quantized.used + pool.quantized.cached) * self.config.page_size
        full = tokens * sizes.bf16_token
        return EngineStats(
            **counts,
            quantized=quantized,
            windows=windows,
            capacity_tokens=self.capacity_tokens,
            cached_bytes=taken,
            bf16_bytes=full,
            saved_bytes=full - taken,
            bytes_per_token=(sizes.window_page if self.plain else sizes.page) / self.config.page_size,
            prefix_hits=pool.hits,
            prefix_hit_tokens=pool.hit_tokens,
            evictions=pool.evictions if sizes.window_page else pool.quantized.evictions,
        )


def choose_artifact(path: Path, loaded: LoadedModel, options: EngineOptions) -> Artifact | None:
    """The artifact to serve ``path`` with; ``None`` for the BF16 baseline and the SRFT codec.

    Raises
    ------
    ArtifactError
        There is none, or it does not fit the model or the number of bits.
    """
    if options.kv_cache_dtype == BF16 or options.srft:
        return None
    if options.artifact in ("hadamard", "none"):
        config = OscarConfig.from_dtype(options.kv_cache_dtype)
        return Artifact.plain(loaded.config, options.artifact, config=config)  # type: ignore[arg-type]
    artifact = Artifact.load(find_artifact(path, options.artifact))
    artifact.check_model(loaded.config)
    return artifact.for_bits(*KV_CACHE_DTYPES[options.kv_cache_dtype])


def allocate_stores(
    loaded: LoadedModel, artifact: Artifact | None, options: EngineOptions, *, device: torch.device
) -> CacheStores:
    """Allocate ``options.kv_cache_memory`` bytes for both tiers.

    Raises
    ------
    ConfigError
        Not even one request of ``max_model_len`` tokens fits; the message says what does.
    """
    if options.srft:
        return _srft_stores(loaded, options, device)
    config = _cache_config(artifact, options)
    if artifact is not None:
        if artifact.quantile_clip is not None:
            raise ArtifactError(
                "the artifact clips at quantiles (preset paper), which is for evaluation; calibrate anew"
            )
        missing = [layer.index for layer in loaded.layers if layer.index not in artifact.layers]
        if missing:
            raise ArtifactError(f"the artifact has no layer {missing[0]}; calibrate this model")
    layouts = [PageLayout(layer.head_dim, config) for layer in loaded.layers]
    pairs = list(zip(loaded.layers, layouts, strict=True))
    sizes = Sizes(
        page=sum(layout.page_bytes(layer.heads) for layer, layout in pairs),
        window_page=sum(layout.window_page_bytes(layer.heads) for layer, layout in pairs),
        bf16_token=sum(2 * layer.heads * layer.head_dim * torch.bfloat16.itemsize for layer in loaded.layers),
    )
    if artifact is None:
        pages = window_pages = _plain_pages(config.page_size, sizes.window_page, options, loaded.max_model_len)
    else:
        pages, window_pages = _pages(config, sizes, options, loaded.max_model_len)
    caches = tuple(
        LayerCache.allocate(
            layout,
            artifact.layers[layer.index]
            if artifact
            else LayerTransform.plain(layer.heads, layer.head_dim, rotate=False),
            layer.spec,
            pages=pages if artifact else 1,
            window_pages=window_pages,
            device=device,
        )
        for layer, layout in pairs
    )
    pool = CachePool(config, pages=pages, window_pages=window_pages, prefix_caching=options.prefix_caching)
    return CacheStores(config, caches, pool, sizes, artifact is None, pages, window_pages)


def _srft_stores(loaded: LoadedModel, options: EngineOptions, device: torch.device) -> CacheStores:
    """The same pool over pages of signed codes.

    Nothing is read unquantized, so the pool's window pages are numbers without tensors: one for the page that a request
    is filling, and one for the page it has just left.
    """
    if device.type not in ("cpu", "mps"):
        raise ConfigError(
            f"{options.kv_cache_dtype}: runs on Apple GPUs and CPUs, not on {device.type}; "
            "use oscar_int2, or device='cpu'"
        )
    size = options.page_size or OscarConfig.page_size
    config = OscarConfig(rotation="none", sink=0, recent=1, page_size=size, prefill_mode="rule")
    codecs = [served_config(options.kv_cache_dtype, layer.head_dim) for layer in loaded.layers]
    pairs = list(zip(loaded.layers, codecs, strict=True))
    sizes = Sizes(
        page=sum(size * layer.heads * sum(codec.row_bytes(layer.head_dim)) for layer, codec in pairs),
        window_page=0,
        bf16_token=sum(2 * layer.heads * layer.head_dim * torch.bfloat16.itemsize for layer in loaded.layers),
    )
    pages = _plain_pages(size, sizes.page, options, loaded.max_model_len)
    layers = tuple(
        SrftLayer.allocate(
            codec, layer.spec, heads=layer.heads, head_dim=layer.head_dim, pages=pages, page_size=size, device=device
        )
        for layer, codec in pairs
    )
    windows = 2 + 2 * options.max_num_seqs
    pool = CachePool(config, pages=pages, window_pages=windows, prefix_caching=options.prefix_caching)
    return CacheStores(config, layers, pool, sizes, False, pages, windows)


def _cache_config(artifact: Artifact | None, options: EngineOptions) -> OscarConfig:
    changes: dict[str, Any] = {"prefill_mode": options.prefill_mode}
    if artifact is None:
        base = OscarConfig(rotation="none", sink=EVERY_POSITION)
        changes |= {"page_size": options.page_size}
    else:
        base = artifact.config
        changes |= {"sink": options.sink, "recent": options.recent, "page_size": options.page_size}
    return base.with_(**{name: value for name, value in changes.items() if value is not None})


def _pages(config: OscarConfig, sizes: Sizes, options: EngineOptions, max_model_len: int) -> tuple[int, int]:
    """Pages of both tiers, null pages included.

    Windows are charged for ``max_num_seqs`` requests, and more for finished prompts where there is memory to spare.
    """
    size, memory = config.page_size, options.kv_cache_memory
    longest = -(-max_model_len // size) + 1
    each = min(longest, -(-config.sink // size) + -(-config.recent // size) + 1)
    # A chunk ends with windows of its own while it still reads the ones before it.
    chunks = -(-options.max_batched_tokens // size) + options.max_num_seqs
    windows = 1 + each * options.max_num_seqs + min(chunks, each * options.max_num_seqs)
    fixed, least = windows * sizes.window_page, (1 + longest) * sizes.page
    if memory < fixed + least:
        raise ConfigError(
            f"kv_cache_memory={_mebibytes(memory)}: the windows of max_num_seqs={options.max_num_seqs} requests take "
            f"{_mebibytes(fixed)} and a request of max_model_len={max_model_len} tokens {_mebibytes(least)} more; give "
            f"{_mebibytes(fixed + least)}{_shorter(memory - fixed, sizes.page, size)} or lower max_num_seqs"
        )
    if options.prefix_caching:
        spare = int((memory - fixed - least) * CACHED_WINDOW_SHARE) // sizes.window_page
        windows += min(spare, each * options.max_num_seqs)
    return (memory - windows * sizes.window_page) // sizes.page, windows


def _plain_pages(size: int, page: int, options: EngineOptions, max_model_len: int) -> int:
    """The same for a cache of one tier, whose pages of ``size`` tokens take ``page`` bytes."""
    memory = options.kv_cache_memory
    least = (2 + -(-max_model_len // size)) * page
    if memory < least:
        raise ConfigError(
            f"kv_cache_memory={_mebibytes(memory)}: one request of max_model_len={max_model_len} tokens takes "
            f"{_mebibytes(least)} in {options.kv_cache_dtype}; give that much{_shorter(memory, page, size)}"
        )
    return memory // page


def _shorter(memory: int, page: int, size: int) -> str:
    """The longest ``max_model_len`` that would fit, if any: one page is the null page, and one to spare."""
    tokens = (memory // page - 2) * size
    return f", use max_model_len={tokens}" if tokens > 0 else ""


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
