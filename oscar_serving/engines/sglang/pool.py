"""The KV pool: SGLang's paged pool with INT2 pages, and the window store of its requests."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from oscar_kernels.triton.rows import RowLayout
from oscar_serving.codec import PageLayout
from oscar_serving.engines.sglang.configurator import calibration_of, running_requests
from oscar_serving.engines.sglang.layer import OscarLayer
from oscar_serving.engines.sglang.options import PAGE, SPARE_SINKS, WINDOW_PAGE
from oscar_serving.engines.sglang.rows import Rows
from oscar_serving.engines.sglang.store import first_ring, ring_pages, sink_pages, window_pages
from oscar_serving.engines.sglang.transforms import Calibration, layer_transform


def pool_class(kvc: Any) -> type:
    """Pool class for the model that ``kvc`` configures: SGLang constructs it with the arguments of its own pool."""
    known = calibration_of(kvc)
    return type(
        "OscarKVPool", (OscarKVPool,), {"calibration": known, "running": running_requests(), "kind": kvc.model_dtype}
    )


class OscarKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """Every token in INT2 at the slot that SGLang gave it; sink and recent tokens in bfloat16 beside."""

    calibration: ClassVar[Calibration]
    running: ClassVar[int]
    kind: ClassVar[torch.dtype]

    def _create_buffers(self) -> None:
        config = self.calibration.config
        if self.page_size != PAGE:
            raise RuntimeError(f"oscar: pages of {self.page_size} tokens; they must have {PAGE}")
        layout = PageLayout(self.head_dim, config)
        parallel = get_parallel()
        pages = (self.size + self.page_size) // PAGE
        windows = window_pages(config, self.running)
        self.layers = [
            OscarLayer(
                layout,
                layer_transform(
                    self.calibration, self.start_layer + i, self.head_num, self.head_dim,
                    ranks=parallel.attn_tp_size, rank=parallel.attn_tp_rank,
                ),
                torch.zeros(pages, self.head_num, layout.head_bytes, dtype=torch.uint8, device=self.device),
                torch.zeros(
                    windows, 2, self.head_num, WINDOW_PAGE, self.head_dim, dtype=torch.bfloat16, device=self.device
                ),
                self.kind,
            )
            for i in range(self.layer_num)
        ]  # fmt: skip
        self.k_buffer = [layer.pages for layer in self.layers]
        self.v_buffer: list[torch.Tensor] = []
        self.rows = Rows(self.running, config.sink, SPARE_SINKS if config.sink else 0)
        zeros = torch.zeros(self.running + 1, dtype=torch.int32, device=self.device)
        self.row_layout = RowLayout(
            zeros, zeros.clone(), zeros.clone(), sink_pages(config), ring_pages(config),
            first_ring(config, self.running),
        )  # fmt: skip

    def flush_rows(self) -> None:
        """Bring the device's copy of the rows up to date; on the stream of the step that is about to read it."""
        changes = self.rows.take_changes()
        if not changes:
            return
        pages = self.row_layout.sink_pages
        table = torch.tensor(
            [
                [row, 1 + (s.sink - 1) * pages if s.sink else 0, int(s.writes), s.valid_from]
                for row, s in changes.items()
            ],
            dtype=torch.int32,
        ).to(self.device, non_blocking=True)
        row = table[:, 0].long()
        for column, target in enumerate(self.row_layout[:3], 1):
            target[row] = table[:, column]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the INT2 pages, and of the window store (SGLang logs them as K and V)."""
        return sum(x.pages.nbytes for x in self.layers), sum(x.windows.nbytes for x in self.layers)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "oscar: this part of SGLang reads or writes the KV pool itself and would get packed bytes; "
            "use another kv-cache dtype with it"
        )

    set_kv_buffer = get_key_buffer = get_value_buffer = get_kv_buffer = _refuse
    move_kv_cache = get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = get_device_pool_infos = _refuse
