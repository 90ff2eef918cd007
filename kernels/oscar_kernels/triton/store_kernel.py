"""Writing new K and V to both stores: the device code. Its bytes are those of the torch codec."""

import triton
import triton.language as tl

from oscar_kernels.triton.common_kernel import e4m3_to_f32, f32_to_e4m3

FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def _rotated(
    x, x_at, live, matrix, mean, mean_at, p: tl.constexpr, ROW: tl.constexpr, RP: tl.constexpr,
    ROTATE: tl.constexpr, HAS_MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels ``p * ROW … (p + 1) * ROW`` of the rotated rows, float32 ``[tokens, RP]``."""
    if ROTATE:
        if PRECISION == "fp16":
            y = tl.dot(x.to(tl.float16), matrix)
        else:
            y = tl.dot(x, matrix, input_precision=PRECISION)
    else:
        j = tl.arange(0, RP)
        y = tl.load(x_at[:, None] + (p * ROW + j)[None, :], mask=live[:, None] & (j < ROW)[None, :], other=0.0)
        y = y.to(tl.float32)
        if HAS_MEAN:
            y = y - tl.load(mean + mean_at + j, mask=j < ROW, other=0.0)[None, :]
    return y


@triton.jit
def _store_one(
    x, mean, rotation, shrink, unit, codes, meta, window, slots, window_slots, tokens, tile0, head,
    x_token, x_head, page_c, head_c, page_m, head_m, win_page, win_head, win_token,
    HEAD: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = HEAD // PER
    SIZE: tl.constexpr = HEAD // GROUPS
    TOP: tl.constexpr = (1 << BITS) - 1
    c = tl.arange(0, DP)
    j = tl.arange(0, RP)
    factor = tl.load(shrink + head)
    matrices = ()
    for p in tl.static_range(PER):
        if ROTATE:
            r = tl.load(
                rotation + head * HEAD * HEAD + c[:, None] * HEAD + (p * ROW + j)[None, :],
                mask=(c < HEAD)[:, None] & (j < ROW)[None, :],
                other=0.0,
            )
            if PRECISION == "fp16":
                r = r.to(tl.float16)
            matrices = matrices + (r,)
        else:
            matrices = matrices + (0,)
    if HAS_MEAN:
        center = tl.load(mean + head * HEAD + c, mask=c < HEAD, other=0.0)
    for tile in range(tile0, tile0 + TILES):
        row = tile * BT + tl.arange(0, BT)
        slot = tl.load(slots + row, mask=row < tokens, other=-1)
        window_slot = tl.load(window_slots + row, mask=row < tokens, other=-1)
        live = (slot >= 0) | (window_slot >= 0)
        x_at = x + row.to(tl.int64) * x_token + head * x_head
        rows = x_at
        if ROTATE:
            rows = tl.load(x_at[:, None] + c[None, :], mask=live[:, None] & (c < HEAD)[None, :], other=0.0)
            rows = rows.to(tl.float32)
            if HAS_MEAN:
                rows = rows - center[None, :]
        window_base = (
            window
            + (window_slot // WPAGE) * win_page
            + head.to(tl.int64) * win_head
            + (window_slot % WPAGE) * win_token
        )
        plane = ()
        for p in tl.static_range(PER):
            y = _rotated(
                rows, x_at, live, matrices[p], mean, head * HEAD + p * ROW, p, ROW, RP, ROTATE, HAS_MEAN, PRECISION
            )
            tl.store(
                window_base[:, None] + (p * ROW + j)[None, :],
                y.to(window.dtype.element_ty),
                mask=(window_slot >= 0)[:, None] & (j < ROW)[None, :],
            )
            y = tl.where(y != y, 0.0, y)
            plane = plane + (tl.minimum(tl.maximum(y, -FLOAT16_MAX), FLOAT16_MAX),)
        page = slot // PAGE
        place = slot % PAGE
        meta_base = meta + page * page_m + head.to(tl.int64) * head_m + place * GROUPS
        minima = ()
        inverses = ()
        for g in tl.static_range(GROUPS):
            lo = tl.full([BT], float("inf"), tl.float32)
            hi = tl.full([BT], float("-inf"), tl.float32)
            for p in tl.static_range(PER):
                if p * ROW < (g + 1) * SIZE and (p + 1) * ROW > g * SIZE:
                    inside = ((p * ROW + j) >= g * SIZE) & ((p * ROW + j) < (g + 1) * SIZE) & (j < ROW)
                    lo = tl.minimum(lo, tl.min(tl.where(inside[None, :], plane[p], float("inf")), axis=1))
                    hi = tl.maximum(hi, tl.max(tl.where(inside[None, :], plane[p], float("-inf")), axis=1))
            lo = lo * factor
            hi = hi * factor
            scale = (hi - lo) * (1.0 / TOP)
            if META8:
                u = tl.load(unit + head) + tl.zeros([BT], tl.float32)
                scale8 = f32_to_e4m3(tl.minimum(tl.maximum(tl.div_rn(scale, u), -448.0), 448.0))
                lo8 = f32_to_e4m3(tl.minimum(tl.maximum(tl.div_rn(lo, u), -448.0), 448.0))
                scale = e4m3_to_f32(scale8) * u
                lo = e4m3_to_f32(lo8) * u
                word = (scale8 | (lo8 << 8)).to(tl.int16)
            else:
                scale16 = scale.to(tl.float16)
                lo16 = lo.to(tl.float16)
                scale = scale16.to(tl.float32)
                lo = lo16.to(tl.float32)
                low = scale16.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                word = low | (lo16.to(tl.int16, bitcast=True).to(tl.int32) << 16)
            tl.store(meta_base + g, word, mask=slot >= 0)
            one = tl.full([BT], 1.0, tl.float32)
            safe = tl.where(scale > 0, scale, 1.0)
            minima = minima + (lo,)
            inverses = inverses + (tl.where(scale > 0, tl.div_rn(one, safe), 0.0),)
        packed = tl.zeros([BT, RP], tl.int32)
        for p in tl.static_range(PER):
            minimum = tl.zeros([BT, RP], tl.float32)
            inverse = tl.zeros([BT, RP], tl.float32)
            for g in tl.static_range(GROUPS):
                if p * ROW < (g + 1) * SIZE and (p + 1) * ROW > g * SIZE:
                    if p * ROW >= g * SIZE and (p + 1) * ROW <= (g + 1) * SIZE:
                        minimum += minima[g][:, None]
                        inverse += inverses[g][:, None]
                    else:
                        inside = ((p * ROW + j) >= g * SIZE) & ((p * ROW + j) < (g + 1) * SIZE)
                        minimum = tl.where(inside[None, :], minima[g][:, None], minimum)
                        inverse = tl.where(inside[None, :], inverses[g][:, None], inverse)
            code = tl.floor((plane[p] - minimum) * inverse + 0.5)
            code = tl.minimum(tl.maximum(code, 0.0), TOP * 1.0).to(tl.int32)
            packed = packed | (code << (BITS * p))
        code_base = codes + page * page_c + head.to(tl.int64) * head_c + place * ROW
        tl.store(code_base[:, None] + j[None, :], packed.to(tl.uint8), mask=(slot >= 0)[:, None] & (j < ROW)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    k, v, k_mean, v_mean, k_rotation, v_rotation, k_shrink, v_shrink, k_unit, v_unit,
    k_codes, k_meta, v_codes, v_meta, k_win, v_win, slots, window_slots, tokens,
    k_token, k_head, v_token, v_head,
    page_k, head_k, page_km, head_km, page_v, head_v, page_vm, head_vm, win_page, win_head, win_token,
    HEAD: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, KRP: tl.constexpr, VRP: tl.constexpr,
    GROUPS: tl.constexpr, META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr,
    K_MEAN: tl.constexpr, V_MEAN: tl.constexpr, K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid ``(tokens / (BT * TILES), heads, 2)``: K and V in one launch."""
    tile0 = tl.program_id(0) * TILES
    head = tl.program_id(1)
    if tl.program_id(2) == 0:
        _store_one(
            k, k_mean, k_rotation, k_shrink, k_unit, k_codes, k_meta, k_win, slots, window_slots, tokens, tile0, head,
            k_token, k_head, page_k, head_k, page_km, head_km, win_page, win_head, win_token,
            HEAD, DP, KRP, KB, GROUPS, META8, PAGE, WPAGE, K_MEAN, K_ROTATE, PRECISION, BT, TILES,
        )  # fmt: skip
    else:
        _store_one(
            v, v_mean, v_rotation, v_shrink, v_unit, v_codes, v_meta, v_win, slots, window_slots, tokens, tile0, head,
            v_token, v_head, page_v, head_v, page_vm, head_vm, win_page, win_head, win_token,
            HEAD, DP, VRP, VB, GROUPS, META8, PAGE, WPAGE, V_MEAN, V_ROTATE, PRECISION, BT, TILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["page_stride", "window_stride"])
def slots_kernel(
    query_start, lengths, page_table, window_table, slots, window_slots, page_stride, window_stride,
    SINK: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, RING: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Slot of each new token in both stores, -1 for none; grid ``(longest chunk / BT, requests)``."""
    request = tl.program_id(1)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    length = tl.load(lengths + request)
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    live = (i < count) & (length > 0)
    position = length - count + i
    page = tl.load(page_table + request.to(tl.int64) * page_stride + position // PAGE, mask=live, other=0)
    slot = tl.where(page > 0, page.to(tl.int64) * PAGE + position % PAGE, -1)
    if RING > 0:
        line = tl.load(window_table + request.to(tl.int64) * window_stride).to(tl.int64)
        place = tl.where(position < SINK, position, SINK + position % RING)
        # of positions that share a ring slot, the last one of the chunk is written
        keep = (position < SINK) | (position >= length - RING)
        window_slot = tl.where(keep, line * WPAGE + place, -1)
    else:
        entry = tl.load(window_table + request.to(tl.int64) * window_stride + position // WPAGE, mask=live, other=0)
        window_slot = tl.where(entry > 0, entry.to(tl.int64) * WPAGE + position % WPAGE, -1)
    tl.store(slots + start + i, slot, mask=live)
    tl.store(window_slots + start + i, window_slot, mask=live)
