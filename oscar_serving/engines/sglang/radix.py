"""SGLang's radix cache, which keeps a hit's recent window exact and tells the rows which sinks may be shared."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from oscar_serving.engines.sglang.pool import OscarKVPool


def salt_of(request: Any) -> str:
    """What keeps two requests with the same tokens apart in the prefix cache: adapter and salt."""
    return f"{request.extra_key or ''}\0{request.cache_salt or ''}"


class OscarRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """A hit ends at least ``recent`` tokens before the prompt's end, so that decoding finds its window in the row."""

    @property
    def _pool(self) -> OscarKVPool:
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        assert isinstance(pool, OscarKVPool)
        return pool

    def swa_reprefill_tail_tokens(self, req: Any = None) -> int:
        """Tokens at the end of a prompt that are always computed again."""
        return max(self._pool.calibration.config.recent, super().swa_reprefill_tail_tokens(req))

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the request's tokens; from now on other requests may read its sink."""
        if not self.disable:
            self._pool.rows.publish(req.kv.req_pool_idx, req.full_untruncated_fill_ids[:up_to], salt_of(req))
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

    def reset(self) -> None:
        """Empty the tree, and share no sink any more."""
        super().reset()
        self._pool.rows.forget()
