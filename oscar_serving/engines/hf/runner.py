"""One step of the model: tables for the kernels, one packed row of tokens, logits where they are needed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from oscar_serving.attention.base import AttentionBackend, BatchTables, LayerCache
from oscar_serving.cache.pool import CachePool
from oscar_serving.engines.apple.paged import SrftBackend, SrftLayer
from oscar_serving.engines.hf.attention import AttachedLayer, StepTables
from oscar_serving.engines.hf.model import LoadedModel
from oscar_serving.engines.hf.scheduler import Chunk


class Runner:
    """Runs the model over chunks of requests; owns the layers' caches."""

    def __init__(
        self,
        loaded: LoadedModel,
        caches: Seq[LayerCache | SrftLayer],
        backend: AttentionBackend | SrftBackend,
        *,
        raw_prefill: bool,
    ) -> None:
        self._model = loaded.model
        self._device = caches[0].pages.device
        self._raw_prefill = raw_prefill
        self._step = StepTables()
        self.caches = tuple(caches)
        self._first = loaded.layers[0].module
        for layer, cache in zip(loaded.layers, caches, strict=True):
            layer.module.oscar_layer = AttachedLayer(cache, backend, self._step)  # type: ignore[assignment]

    @torch.inference_mode()
    def forward(self, chunks: Seq[Chunk], pool: CachePool, rows: list[int]) -> Tensor:
        """Compute the chunks and store their K and V.

        Parameters
        ----------
        chunks
            What the scheduler chose; their pages are reserved in ``pool``.
        rows
            Rows of the packed tokens whose logits are wanted.

        Returns
        -------
        Tensor
            Logits ``[len(rows), vocab]`` in the model's type.
        """
        if self._first.oscar_layer.step is not self._step:  # type: ignore[union-attr]
            raise RuntimeError("another engine has taken over this model; load the model once for each engine")
        tokens: list[int] = []
        positions: list[Tensor] = []
        for chunk in chunks:
            tokens += chunk.tokens
            positions.append(torch.arange(chunk.start, chunk.start + chunk.count))
        self._step.tables = self.tables(chunks, pool)
        try:
            output = self._model(
                input_ids=torch.tensor(tokens, device=self._device)[None],
                position_ids=torch.cat(positions).to(self._device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self._device),
            )
        finally:
            self._step.tables = None
        return output.logits[0]

    def tables(self, chunks: Seq[Chunk], pool: CachePool) -> BatchTables:
        """Tables of the chunks; a chunk of one token is a decode step, which reads nothing raw."""
        query_start, lengths, chunk_start = [0], [], []
        tables = [pool.table(chunk.sequence.request_id) for chunk in chunks]
        pages = np.zeros((2, len(chunks), max(len(table[0]) for table in tables)), dtype=np.int32)
        for row, (chunk, (page, window)) in enumerate(zip(chunks, tables, strict=True)):
            end = chunk.start + chunk.count
            query_start.append(query_start[-1] + chunk.count)
            lengths.append(end)
            chunk_start.append(chunk.start if self._raw_prefill and chunk.count > 1 else end)
            pages[0, row, : len(page)] = page
            pages[1, row, : len(window)] = window
        page_table, window_table = torch.from_numpy(pages).to(self._device)
        starts, ends, raw = (
            torch.tensor(values, dtype=torch.int32, device=self._device)
            for values in (query_start, lengths, chunk_start)
        )
        return BatchTables(starts, ends, raw, page_table, window_table, (query_start, lengths, chunk_start))
