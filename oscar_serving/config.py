"""The one configuration of an OSCAR cache.

Command line, JSON and engine plugins all parse into :class:`OscarConfig`; nothing downstream reads loose options.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

ScaleDtype = Literal["float16", "float8_e4m3"]
WindowDtype = Literal["bfloat16", "float16", "float32"]
Levels = Literal["affine", "lloyd_max"]
PrefillMode = Literal["raw", "rule"]
RotationSource = Literal["artifact", "hadamard", "none"]

#: ``--kv-cache-dtype`` name → (bits of K, bits of V).
KV_CACHE_DTYPES: dict[str, tuple[int, int]] = {"oscar_int2": (2, 2), "oscar_k4v2": (4, 2)}

#: Kernels hold positions in 32 bits.
LAST_POSITION = 2**31 - 1


class ConfigError(ValueError):
    """A field has a value that is not allowed; the message names field, value and what is allowed."""


@dataclass(frozen=True)
class OscarConfig:
    """Layout and policy of a mixed-precision cache.

    Attributes
    ----------
    k_bits, v_bits
        Bits of a stored element of K and of V, 2 or 4 each.
    group_size
        Channels that share one scale and minimum; ``None`` means the whole head.
    sink, recent
        Tokens at the start of a sequence, and most recent tokens of a query, that are read in ``window_dtype``.
    page_size
        Tokens a page, a multiple of 16.
    scale_dtype
        Storage type of scale and minimum.
    window_dtype
        Storage type of sink and recent tokens.
    levels
        ``affine`` (served) or ``lloyd_max`` (evaluation only).
    prefill_mode
        ``raw``: the tokens of one chunk see each other's unquantized K and V. ``rule``: every query obeys the
        position rule, so that the result does not depend on chunking or prefix hits.
    rotation
        Where rotations come from: a calibrated artifact, a plain Hadamard, or none.
    """

    k_bits: int = 2
    v_bits: int = 2
    group_size: int | None = None
    sink: int = 64
    recent: int = 256
    page_size: int = 32
    scale_dtype: ScaleDtype = "float16"
    window_dtype: WindowDtype = "bfloat16"
    levels: Levels = "affine"
    prefill_mode: PrefillMode = "raw"
    rotation: RotationSource = "artifact"

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            _one_of(name, getattr(self, name), (2, 4))
        _within("sink", self.sink, 0, LAST_POSITION)
        _within("recent", self.recent, 1, LAST_POSITION)  # a query always reads itself unquantized
        if self.group_size is not None and (not _is_int(self.group_size) or self.group_size < 8 or self.group_size % 8):
            raise ConfigError(f"group_size={self.group_size!r}: allowed is None (whole head) or a multiple of 8")
        if not _is_int(self.page_size) or self.page_size < 16 or self.page_size % 16:
            raise ConfigError(f"page_size={self.page_size!r}: allowed is a positive multiple of 16")
        _one_of("scale_dtype", self.scale_dtype, get_args(ScaleDtype))
        _one_of("window_dtype", self.window_dtype, get_args(WindowDtype))
        _one_of("levels", self.levels, get_args(Levels))
        _one_of("prefill_mode", self.prefill_mode, get_args(PrefillMode))
        _one_of("rotation", self.rotation, get_args(RotationSource))

    @classmethod
    def from_dtype(cls, kv_cache_dtype: str, **options: Any) -> OscarConfig:
        """Configuration of a ``--kv-cache-dtype`` name, with further options by field name."""
        _one_of("kv_cache_dtype", kv_cache_dtype, tuple(KV_CACHE_DTYPES))
        k_bits, v_bits = KV_CACHE_DTYPES[kv_cache_dtype]
        return cls.from_dict({"k_bits": k_bits, "v_bits": v_bits, **options})

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> OscarConfig:
        """Parse a mapping; an unknown key is an error, never dropped."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"{name}={options[name]!r}: unknown field; allowed are {', '.join(sorted(known))}")
        return cls(**options)

    def with_(self, **options: Any) -> OscarConfig:
        """A copy with some fields replaced (validated again)."""
        return replace(self, **options)

    def groups(self, head_dim: int) -> int:
        """Number of quantization groups in a head of ``head_dim`` channels."""
        if head_dim < 8 or head_dim % 8:
            raise ConfigError(f"head_dim={head_dim}: allowed is a multiple of 8")
        size = self.group_size or head_dim
        if head_dim % size:
            raise ConfigError(f"group_size={size}: must divide the head size {head_dim}")
        return head_dim // size


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in allowed):  # 2.0 is not 2
        raise ConfigError(f"{name}={value!r}: allowed is {', '.join(map(repr, allowed))}")


def _within(name: str, value: object, least: int, most: int) -> None:
    if not _is_int(value) or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r}: allowed is an integer from {least} to {most}")
