"""What the user asked for: options on SGLang's command line, or the environment where there is none."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_serving.config import KV_CACHE_DTYPES, ConfigError, OscarConfig

#: Tokens of a page of SGLang's pool, and of a page of the window store.
PAGE = 64
WINDOW_PAGE = 16
#: Sinks of cached prefixes whose requests have ended, kept beyond one a running request.
SPARE_SINKS = 32
#: The name that the upstream proposal uses.
ALIASES = {"int2": "oscar_int2"}
DTYPES = (*KV_CACHE_DTYPES, *ALIASES)

#: Option → (environment variable, parser of its text, help).
_OPTIONS: dict[str, tuple[str, Any, str]] = {
    "artifact": ("OSCAR_ARTIFACT", str, "'auto', an artifact's folder, or 'hadamard' or 'none' (uncalibrated)"),
    "sink": ("OSCAR_SINK", int, "first tokens of a request that are read unquantized"),
    "recent": ("OSCAR_RECENT", int, "most recent tokens that are read unquantized"),
    "prefill_mode": ("OSCAR_PREFILL_MODE", str, "'raw' or 'rule'"),
    "group_size": ("OSCAR_GROUP_SIZE", int, "channels that share a scale and a minimum"),
    "scale_dtype": ("OSCAR_SCALE_DTYPE", str, "'float16' or 'float8_e4m3'"),
}  # fmt: skip


@dataclass(frozen=True)
class SglangOptions:
    """Options of the plugin.

    Attributes
    ----------
    dtype
        ``oscar_int2`` or ``oscar_k4v2``.
    artifact
        ``auto`` (shipped, or in ``$OSCAR_ARTIFACTS``), a folder, or ``hadamard`` or ``none``: uncalibrated.
    overrides
        Fields of :class:`~oscar_serving.config.OscarConfig` that the user set.
    """

    dtype: str
    artifact: str
    overrides: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, dtype: str, given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> SglangOptions:
        """Options on the command line win over the environment; raises :class:`ConfigError`."""
        values: dict[str, Any] = {}
        for name, (variable, kind, _) in _OPTIONS.items():
            if given.get(name) is not None:
                values[name] = given[name]
            elif environ.get(variable):
                try:
                    values[name] = kind(environ[variable])
                except ValueError:
                    raise ConfigError(f"{variable}={environ[variable]!r}: must be a whole number") from None
        artifact = values.pop("artifact", "auto")
        options = cls(ALIASES.get(dtype, dtype), artifact, tuple(values.items()))
        options.config()
        return options

    def config(self, base: OscarConfig | None = None) -> OscarConfig:
        """The cache's configuration: ``base`` (the artifact's) or the dtype's defaults, with the overrides."""
        k_bits, v_bits = KV_CACHE_DTYPES[self.dtype]
        if base is not None:
            for key in ("group_size", "scale_dtype"):
                asked = dict(self.overrides).get(key, getattr(base, key))
                if asked != getattr(base, key):
                    raise ConfigError(f"{key}={asked!r}: the artifact was calibrated for {getattr(base, key)!r}")
        return (base or OscarConfig()).with_(
            k_bits=k_bits, v_bits=v_bits, page_size=PAGE, window_dtype="bfloat16", **dict(self.overrides)
        )


def add_arguments(parser: ArgumentParser) -> None:
    """``--oscar-artifact`` and its like."""
    group = parser.add_argument_group("oscar", "Options of --kv-cache-dtype oscar_int2 and oscar_k4v2")
    for name, (variable, kind, text) in _OPTIONS.items():
        group.add_argument(f"--oscar-{name.replace('_', '-')}", type=kind, default=None, help=f"{text} (${variable})")


def read_arguments(args: Namespace) -> dict[str, Any]:
    """The options that ``args`` has."""
    return {name: value for name in _OPTIONS if (value := getattr(args, f"oscar_{name}", None)) is not None}


def export(given: Mapping[str, Any]) -> None:
    """Hand options to the processes that SGLang will start."""
    for name, value in given.items():
        os.environ[_OPTIONS[name][0]] = str(value)
