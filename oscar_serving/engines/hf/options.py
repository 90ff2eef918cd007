"""How the engine is set up, and what it reports about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from oscar_serving.codec.srft_int4 import SRFT_DTYPES
from oscar_serving.config import KV_CACHE_DTYPES, ConfigError, OscarConfig, PrefillMode

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

#: ``kv_cache_dtype`` of the plain baseline: paged BF16, no INT2 tier.
BF16 = "bf16"


@dataclass(frozen=True)
class EngineOptions:
    """Options of :meth:`~oscar_serving.engines.hf.engine.Engine.load`; validated on construction.

    Attributes
    ----------
    kv_cache_dtype
        ``oscar_int2``, ``oscar_k4v2``; ``srft_int4``, ``srft_k8v4`` (Apple GPUs and CPUs); or ``bf16`` for the plain
        paged baseline.
    artifact
        ``auto`` finds the calibrated artifact of the model and refuses to start without one; a path names it;
        ``hadamard`` and ``none`` serve uncalibrated, for comparison. The SRFT types read no artifact.
    kv_cache_memory
        Bytes for the INT2 pages and the windows of all layers together.
    max_model_len
        Longest prompt plus output, in tokens; ``None`` takes the model's own limit.
    max_num_seqs
        Requests computed together.
    max_batched_tokens
        Tokens computed in one step: the length of a prefill chunk when nothing else runs.
    max_waiting
        Requests that may wait; more are refused with code ``queue_full``.
    prefill_mode
        See :class:`~oscar_serving.config.OscarConfig`. The SRFT types read every token from its codes in either.
    prefix_caching
        Reuse the cache of equal prompt beginnings.
    sink, recent, page_size
        Override the artifact's windows and the page size; ``None`` keeps them.
    device, dtype
        Where and in which type the model runs; ``auto`` takes CUDA, MPS or CPU in this order, and the type
        that is fastest there.
    seed
        Base of the generators of requests that bring no seed.
    threads
        CPU threads; ``None`` leaves torch's choice.
    model_id
        Name to report; ``None`` takes the folder's.
    """

    kv_cache_dtype: str = "oscar_int2"
    artifact: str = "auto"
    kv_cache_memory: int = 1 << 30
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_batched_tokens: int = 512
    max_waiting: int = 512
    prefill_mode: PrefillMode = "raw"
    prefix_caching: bool = True
    sink: int | None = None
    recent: int | None = None
    page_size: int | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    seed: int = 0
    threads: int | None = None
    model_id: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kv_cache_dtype", (*KV_CACHE_DTYPES, *SRFT_DTYPES, BF16)),
            ("prefill_mode", get_args(PrefillMode)),
            ("device", get_args(Device)),
            ("dtype", get_args(Dtype)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: allowed is {', '.join(map(repr, allowed))}")
        for name in (
            "kv_cache_memory",
            "max_model_len",
            "max_num_seqs",
            "max_batched_tokens",
            "max_waiting",
            "threads",
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "threads"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: allowed is an integer of at least 1")
        layout = {name: getattr(self, name) for name in ("sink", "recent", "page_size")}
        OscarConfig().with_(**{name: value for name, value in layout.items() if value is not None})
        if self.srft:
            self._check_srft()
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens}: at least max_num_seqs={self.max_num_seqs}, "
                "so that every running request can decode in a step"
            )

    @property
    def srft(self) -> bool:
        """Whether the cache is of the SRFT codec."""
        return self.kv_cache_dtype in SRFT_DTYPES

    def _check_srft(self) -> None:
        name = self.kv_cache_dtype
        for window in ("sink", "recent"):
            if (value := getattr(self, window)) is not None:
                raise ConfigError(f"{window}={value}: {name} keeps no unquantized tokens; leave {window} out")
        if self.artifact not in ("auto", "none"):
            raise ConfigError(f"artifact={self.artifact!r}: {name} reads no artifact; leave it out")
        if self.device == "cuda":
            raise ConfigError(f"device='cuda': {name} runs on Apple GPUs and CPUs; use oscar_int2, or device='cpu'")


@dataclass(frozen=True)
class TierStats:
    """Pages of one store, the null page apart: all, held by running requests, kept by the prefix index."""

    total: int
    used: int
    cached: int
    bytes: int


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes
    ----------
    running, waiting
        Requests.
    prompt_tokens, generated_tokens, cached_prompt_tokens
        Counts since start: prompt tokens submitted, tokens sampled, prompt tokens taken from the prefix
        cache.
    requests_finished, requests_failed, preemptions
        Counts since start; finished counts stop and length, failed counts errors.
    quantized, windows
        Occupancy of the INT2 pages and of the BF16 windows; ``bytes`` is what the tier's tensors take.
    capacity_tokens
        Tokens that fit in the INT2 tier.
    cached_bytes, bf16_bytes, saved_bytes
        Bytes of the pages in use (both tiers), what a BF16 cache would take for the tokens they hold, and the
        difference.
    bytes_per_token
        Bytes of one token in the INT2 tier over all layers, scales included; windows apart.
    prefix_hits, prefix_hit_tokens, evictions
        Counts of the prefix index since start.
    """

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    cached_prompt_tokens: int
    requests_finished: int
    requests_failed: int
    preemptions: int
    quantized: TierStats
    windows: TierStats
    capacity_tokens: int
    cached_bytes: int
    bf16_bytes: int
    saved_bytes: int
    bytes_per_token: float
    prefix_hits: int
    prefix_hit_tokens: int
    evictions: int

    @property
    def cache_usage(self) -> float:
        """Share of the pages held by running requests, 0 to 1 (of the INT2 tier, where there is one)."""
        tier = self.quantized if self.quantized.total else self.windows
        return tier.used / tier.total
