"""Sizes of the window store: a null page, the sinks, and one ring for each running request."""

from __future__ import annotations

from oscar_serving.config import OscarConfig
from oscar_serving.engines.sglang.options import SPARE_SINKS, WINDOW_PAGE


def sink_pages(config: OscarConfig) -> int:
    """Pages of a sink."""
    return -(-config.sink // WINDOW_PAGE)


def ring_pages(config: OscarConfig) -> int:
    """Pages of a ring: the ``recent`` positions that end anywhere in a page."""
    return -(-config.recent // WINDOW_PAGE) + 1


def sinks(config: OscarConfig, running: int) -> int:
    """Sinks for ``running`` requests at once."""
    return running + SPARE_SINKS if config.sink else 0


def first_ring(config: OscarConfig, running: int) -> int:
    """Where the ring of row 0 would lie; row 0 is SGLang's padding row and has none."""
    return 1 + sinks(config, running) * sink_pages(config) - ring_pages(config)


def window_pages(config: OscarConfig, running: int) -> int:
    """Pages of the window store, the null page included."""
    return 1 + sinks(config, running) * sink_pages(config) + running * ring_pages(config)
