"""Decode attention over the mixed-precision paged cache: the device code.

One program serves (split, KV head and row block, request). Rows are (query, query head) pairs that share the KV head.
Split numbers below ``win_splits`` take the 16-bit window keys, the others the INT2 history, so that no loop selects a
tier per element. Every warp of a program takes its own keys (the leading tensor dimension) and keeps its own running
maximum: the loop has no exchange between warps.

Scores are computed with keys as rows, ``S^T = K q^T``, so that eight query rows fill a tensor-core tile.
"""

import triton
import triton.language as tl

from oscar_kernels.triton.common_kernel import LOG2E, planes, split_meta


@triton.jit
def _window_pages(
    table, row, key, valid, from_window, from_sink, SINK: tl.constexpr, WPAGE: tl.constexpr, RING: tl.constexpr
):
    """Window page, slot and presence of each key. ``RING > 0``: one row per request, ``[SINK | RING positions]``."""
    if RING > 0:
        slot = tl.where(key < SINK, key, SINK + key % RING)
        present = valid & (key >= tl.where(key < SINK, from_sink, from_window))
        return row + 0 * key, slot, present
    else:
        page = tl.load(table + key // WPAGE, mask=valid, other=0)
        return page, key % WPAGE, valid & (page != 0)


@triton.jit
def _codes(
    tile, meta, plane_index: tl.constexpr, word, BITS: tl.constexpr, GENERAL: tl.constexpr, meta_base, meta_valid,
    meta_unit, HEAD: tl.constexpr, GROUPS: tl.constexpr, META8: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """fp16 operand of one plane: bare codes where groups align with planes, else dequantized values."""
    if not GENERAL:
        return tile
    row: tl.constexpr = HEAD * BITS // 8
    channel = (plane_index // 2) * row + 2 * word + plane_index % 2
    group = tl.minimum(channel // (HEAD // GROUPS), GROUPS - 1)
    if TRANSPOSE:
        pair = tl.load(meta + meta_base[:, None, :] + group[None, :, None], mask=meta_valid[:, None, :], other=0)
    else:
        pair = tl.load(meta + meta_base[:, :, None] + group[None, None, :], mask=meta_valid[:, :, None], other=0)
    scale, minimum = split_meta(pair, META8)
    factor: tl.constexpr = 2.0 ** (24 - BITS * (plane_index // 2))
    return ((tile.to(tl.float32) * factor * scale + minimum) * meta_unit).to(tl.float16)


@triton.jit
def _int_tile(
    first, q, q_sum, m, l, mins, v_max, acc,
    k_codes, k_meta, v_codes, v_meta, k_unit, v_unit, table, head_k, head_km, head_v, head_vm,
    page_k, page_km, page_v, page_vm, score_scale, bias, position, live_row,
    window_row, window_line, from_window, from_sink, softcap,
    MASKED: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr, META8: tl.constexpr,
    PAGE: tl.constexpr, WPAGE: tl.constexpr, RING: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    KJ: tl.constexpr, VJ: tl.constexpr, ASM: tl.constexpr, K_GENERAL: tl.constexpr, V_GENERAL: tl.constexpr,
):  # fmt: skip
    """One tile of ``W * N`` keys of the INT2 store; returns the running state."""
    KROW: tl.constexpr = HEAD * KB // 16  # half-words a row
    VROW: tl.constexpr = HEAD * VB // 16
    NK: tl.constexpr = 16 // KB
    NV: tl.constexpr = 16 // VB
    key = first + tl.arange(0, W)[:, None] * N + tl.arange(0, N)[None, :]
    if MASKED:
        inside = key <= tl.max(position, axis=0)
        key_read = tl.where(inside, key, 0)
        page = tl.load(table + key_read // PAGE, mask=inside, other=0).to(tl.int64)
        slot = key_read % PAGE
        inside = inside & (page != 0)
    else:
        inside = key >= 0
        if PAGE % (W * N) == 0:
            page = tl.load(table + first // PAGE).to(tl.int64) + tl.full([W, N], 0, tl.int64)
            slot = (first % PAGE) + (key - first)
        else:
            page = tl.load(table + key // PAGE).to(tl.int64)
            slot = key % PAGE
    kj = tl.arange(0, KJ)
    vj = tl.arange(0, VJ)
    k_at = k_codes + (page * page_k + head_k + slot * KROW)[:, :, None] + kj[None, None, :]
    # V is loaded with channels as rows: the operand of O^T = V^T P^T straight from memory
    v_at = v_codes + (page * page_v + head_v + slot * VROW)[:, None, :] + vj[None, :, None]
    if MASKED or KROW != KJ:
        k_words = tl.load(k_at, mask=inside[:, :, None] & (kj < KROW)[None, None, :], other=0)
    else:
        k_words = tl.load(k_at)
    if MASKED or VROW != VJ:
        v_words = tl.load(v_at, mask=inside[:, None, :] & (vj < VROW)[None, :, None], other=0)
    else:
        v_words = tl.load(v_at)
    km_at = page * page_km + head_km + slot * GROUPS
    vm_at = page * page_vm + head_vm + slot * GROUPS

    # ---- scores
    kp = planes(k_words, KB, ASM)
    score = tl.zeros([W, N, q[0].shape[2]], tl.float32)
    if K_GENERAL:
        for i in tl.static_range(NK):
            operand = _codes(
                kp[i], k_meta, i, kj, KB, True, km_at, inside, k_unit, HEAD, GROUPS, META8, False
            )  # fmt: skip
            score = tl.dot(operand, q[i], score)
        score = score * (score_scale * (2.0**-24))
    else:
        for g in tl.static_range(GROUPS):
            part = tl.zeros_like(score)
            for i in tl.static_range(NK):
                if ((i // 2) * (HEAD * KB // 8)) // (HEAD // GROUPS) == g:
                    part = tl.dot(kp[i], q[i], part)
            if MASKED:
                pair = tl.load(k_meta + km_at + g, mask=inside, other=0)
            else:
                pair = tl.load(k_meta + km_at + g)
            scale, minimum = split_meta(pair, META8)
            if META8:
                minimum = minimum * k_unit
                scale = scale * k_unit
            if g == 0:
                score = part * (scale * score_scale)[:, :, None] + minimum[:, :, None] * q_sum[g]
            else:
                score += part * (scale * score_scale)[:, :, None] + minimum[:, :, None] * q_sum[g]
    if SOFTCAP:
        x = (score + bias) / softcap
        # tanh by exp2, stable at both ends
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        t = (1.0 - e) / (1.0 + e)
        score = softcap * tl.where(x < 0, -t, t)
    if MASKED:
        _, _, present = _window_pages(window_row, window_line, key, inside, from_window, from_sink, SINK, WPAGE, RING)
        key3 = key[:, :, None]
        in_window = ((key3 < SINK) | (key3 > position[None, None, :] - RECENT)) & present[:, :, None]
        seen = (key3 <= position[None, None, :]) & live_row[None, None, :] & inside[:, :, None] & (in_window == 0)
        if SLIDING > 0:
            seen = seen & (key3 > position[None, None, :] - SLIDING)
        score = tl.where(seen, score, float("-inf"))

    # ---- softmax, one running maximum per warp and row
    m_new = tl.maximum(m, tl.max(score, axis=1))
    if MASKED:
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_use = m_new
    alpha = tl.exp2(m - m_use)
    p = tl.exp2(score - m_use[:, None, :])
    l = l * alpha + tl.sum(p, axis=1)

    # ---- values: p * scale goes to the tensor cores, p * minimum is a rank-one term
    vp = planes(v_words, VB, ASM)
    new_acc = ()
    new_mins = ()
    if V_GENERAL:
        ph = (p * 16384.0).to(tl.float16)
        for i in tl.static_range(NV):
            operand = _codes(
                vp[i], v_meta, i, vj, VB, True, vm_at, inside, v_unit, HEAD, GROUPS, META8, True
            )  # fmt: skip
            new_acc = new_acc + (tl.dot(operand, ph, acc[i] * alpha[:, None, :]),)
        new_mins = mins
        v_new = v_max
    else:
        # p * scale is brought to [0, 2**14] by its largest value so far, row by row: fp16 neither overflows nor loses
        # small weights
        products = ()
        v_new = v_max
        for g in tl.static_range(GROUPS):
            if MASKED:
                pair = tl.load(v_meta + vm_at + g, mask=inside, other=0)
            else:
                pair = tl.load(v_meta + vm_at + g)
            scale, minimum = split_meta(pair, META8)
            new_mins = new_mins + (mins[g] * alpha + tl.sum(p * minimum[:, :, None], axis=1),)
            product = p * scale[:, :, None]
            products = products + (product,)
            v_new = tl.maximum(v_new, tl.max(product, axis=1))
        gain = 16384.0 / v_new
        shrink = alpha * v_max / v_new
        for g in tl.static_range(GROUPS):
            ph = (products[g] * gain[:, None, :]).to(tl.float16)
            for i in tl.static_range(NV):
                if ((i // 2) * (HEAD * VB // 8)) // (HEAD // GROUPS) == g:
                    new_acc = new_acc + (tl.dot(vp[i], ph, acc[i] * shrink[:, None, :]),)
    return m_new, l, new_mins, v_new, new_acc


@triton.jit(do_not_specialize=["ratio", "table_stride", "window_table_stride", "row_blocks", "splits", "win_splits"])
def decode_kernel(
    q, q_bias, k_codes, k_meta, v_codes, v_meta, k_unit, v_unit, k_win, v_win,
    page_table, window_table, valid_from, sink_from, query_start, lengths, part_o, part_lse,
    scale_log2, softcap_log2, ratio, table_stride, window_table_stride,
    q_token, q_head, bias_token,
    page_k, head_k, page_km, head_km, page_v, head_v, page_vm, head_vm,
    win_page, win_head, win_token,
    heads, row_blocks, splits, win_splits,
    HEAD: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr,
    META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, RING: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, N: tl.constexpr, WN: tl.constexpr,
    CHECK_PAGES: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, K_GENERAL: tl.constexpr,
    V_GENERAL: tl.constexpr, KJ: tl.constexpr, VJ: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See the module; grid ``(splits, heads * row_blocks, requests)``, ``W`` warps."""
    split = tl.program_id(0)
    head = tl.program_id(1) // row_blocks
    block = tl.program_id(1) % row_blocks
    request = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = tl.load(query_start + request)
    queries = tl.load(query_start + request + 1) - start
    length = tl.load(lengths + request)
    row = block * R + tl.arange(0, R)
    rows = queries * ratio
    if (length <= 0) | (block * R >= rows):
        return
    live = row < rows
    query = tl.where(live, row // ratio, queries - 1)
    position = length - queries + query
    q_head_index = head * ratio + tl.where(live, row % ratio, 0)
    token = (start + query).to(tl.int64)
    q_row = q + token * q_token + q_head_index * q_head
    position_min = tl.min(position, axis=0)
    position_max = tl.max(position, axis=0)
    lowest = 0
    if SLIDING > 0:
        lowest = tl.maximum(0, position_min - SLIDING + 1)
    table = page_table + request.to(tl.int64) * table_stride
    window_row = window_table + request.to(tl.int64) * window_table_stride
    window_line = 0
    from_window = 0
    from_sink = 0
    if RING > 0:
        window_line = tl.load(window_row)
        from_window = tl.load(valid_from + request)
        from_sink = tl.load(sink_from + request)
    bias = tl.zeros([1, 1, R], tl.float32)
    if SOFTCAP:
        bias += (tl.load(q_bias + token * bias_token + q_head_index) * scale_log2)[None, None, :]
    out_row = ((request * heads + head) * row_blocks + block) * splits + split
    out_at = part_o + out_row.to(tl.int64) * (R * HEAD)
    lse_at = part_lse + out_row.to(tl.int64) * R + tl.arange(0, R)

    if split < win_splits:
        # ------------------------------------------------------------ window keys
        T: tl.constexpr = W * WN
        sink_first = lowest // T
        sink_tiles = tl.maximum(0, (tl.minimum(SINK, position_max + 1) + T - 1) // T - sink_first)
        recent_low = tl.maximum(tl.maximum(position_min - RECENT + 1, lowest), SINK)
        recent_first = recent_low // T
        # a tile that holds both sinks and recent keys is taken once, as a sink tile
        recent_first = tl.maximum(recent_first, sink_first + sink_tiles)
        recent_tiles = tl.maximum(0, (position_max + T) // T - recent_first)
        c = tl.arange(0, DP)
        q_t = tl.load(q_row[None, :] + c[:, None], mask=(c < HEAD)[:, None] & live[None, :], other=0.0)
        q_win = tl.broadcast_to((q_t * scale_log2).to(k_win.dtype.element_ty)[None, :, :], (W, DP, R))
        acc_w = tl.zeros([W, DP, R], tl.float32)
        m_w = tl.full([W, R], float("-inf"), tl.float32)
        l_w = tl.zeros([W, R], tl.float32)
        for tile in range(split, sink_tiles + recent_tiles, win_splits):
            first = tl.where(tile < sink_tiles, sink_first + tile, recent_first + tile - sink_tiles) * T
            key = first + tl.arange(0, W)[:, None] * WN + tl.arange(0, WN)[None, :]
            page, slot, present = _window_pages(
                window_row, window_line, key, key <= position_max, from_window, from_sink, SINK, WPAGE, RING
            )
            near = present & (key >= lowest) & ((key < SINK) | (key >= recent_low))
            at = page.to(tl.int64) * win_page + head.to(tl.int64) * win_head + slot * win_token
            at3 = at[:, :, None] + c[None, None, :]
            mask3 = near[:, :, None] & (c < HEAD)[None, None, :]
            k_tile = tl.load(k_win + at3, mask=mask3, other=0.0)
            v_tile = tl.load(v_win + at3, mask=mask3, other=0.0)
            score = tl.dot(k_tile, q_win, input_precision="ieee")
            if SOFTCAP:
                x = (score + bias) / softcap_log2
                e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
                t = (1.0 - e) / (1.0 + e)
                score = softcap_log2 * tl.where(x < 0, -t, t)
            key3 = key[:, :, None]
            position3 = position[None, None, :]
            seen = ((key3 < SINK) | (key3 > position3 - RECENT)) & (key3 <= position3)
            seen = seen & near[:, :, None] & live[None, None, :]
            if SLIDING > 0:
                seen = seen & (key3 > position3 - SLIDING)
            score = tl.where(seen, score, float("-inf"))
            m_next = tl.maximum(m_w, tl.max(score, axis=1))
            m_use = tl.where(m_next == float("-inf"), 0.0, m_next)
            alpha = tl.exp2(m_w - m_use)
            p = tl.exp2(score - m_use[:, None, :])
            l_w = l_w * alpha + tl.sum(p, axis=1)
            acc_w = tl.dot(
                tl.trans(v_tile, (0, 2, 1)),
                p.to(v_win.dtype.element_ty),
                acc_w * alpha[:, None, :],
                input_precision="ieee",
            )
            m_w = m_next
        m_all = tl.max(m_w, axis=0)
        m_use = tl.where(m_all == float("-inf"), 0.0, m_all)
        weight = tl.exp2(m_w - m_use[None, :])
        total = tl.sum(l_w * weight, axis=0)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        o_w = tl.sum(acc_w * weight[:, None, :], axis=0) * inverse[None, :]
        tl.store(out_at + tl.arange(0, R)[None, :] * HEAD + c[:, None], o_w, mask=(c < HEAD)[:, None] & live[None, :])
        tl.store(lse_at, tl.where(total > 0, m_all + tl.log2(total), float("-inf")), mask=live)
    else:
        # ------------------------------------------------------------ INT2 history
        TILE: tl.constexpr = W * N
        NK: tl.constexpr = 16 // KB
        NV: tl.constexpr = 16 // VB
        KROW: tl.constexpr = HEAD * KB // 16
        VROW: tl.constexpr = HEAD * VB // 16
        # keys that some row reads from INT2 when all window pages are there, and when some are missing
        low = tl.maximum(lowest, SINK)
        high = tl.maximum(position_max - RECENT + 1, low)
        if CHECK_PAGES > 0:
            if RING > 0:
                near_low = tl.maximum(tl.maximum(position_min - RECENT + 1, lowest), SINK)
                missing = (from_window > near_low) | (from_sink > lowest)
            else:
                slot_index = tl.arange(0, CHECK_PAGES)
                sink_pages = (tl.minimum(SINK, position_max + 1) + WPAGE - 1) // WPAGE
                near_page = tl.maximum(position_min - RECENT + 1, lowest) // WPAGE
                near_page = tl.maximum(near_page, sink_pages)
                index = tl.where(slot_index < sink_pages, slot_index, near_page + slot_index - sink_pages)
                wanted = (index * WPAGE <= position_max) & ((index + 1) * WPAGE > lowest)
                entry = tl.load(window_row + index, mask=wanted, other=1)
                missing = tl.sum((wanted & (entry == 0)).to(tl.int32), axis=0) > 0
            low = tl.where(missing, lowest, low)
            high = tl.where(missing, position_max + 1, high)
        # tiles in which every row reads every key from INT2
        hot_low = tl.maximum(SINK, 0)
        if SLIDING > 0:
            hot_low = tl.maximum(hot_low, position_max - SLIDING + 1)
        tile_low = low // TILE
        tile_high = (high + TILE - 1) // TILE
        count = tl.maximum(0, tile_high - tile_low)
        part = split - win_splits
        parts = splits - win_splits
        t0 = tile_low + (count * part) // parts
        t1 = tile_low + (count * (part + 1)) // parts
        h0 = tl.minimum(tl.maximum(t0, (hot_low + TILE - 1) // TILE), t1)
        h1 = tl.minimum(tl.maximum(h0, tl.maximum(0, position_min - RECENT + 1) // TILE), t1)

        # query planes, normalised by a power of two for fp16; 2**-(bits * plane) folded in
        c = tl.arange(0, DP)
        q_all = tl.load(q_row[:, None] + c[None, :], mask=live[:, None] & (c < HEAD)[None, :], other=0.0) * scale_log2
        peak = tl.max(tl.max(tl.abs(q_all), axis=1), axis=0)
        # exponent of the peak, rounded up: |q| / 2**e < 1
        exponent = ((peak.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
        exponent = tl.minimum(tl.maximum(exponent, -100), 100)
        down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        q_planes = ()
        q_sums = ()
        kj = tl.arange(0, KJ)
        for i in tl.static_range(NK):
            channel = (i // 2) * (HEAD * KB // 8) + 2 * kj + i % 2
            x = tl.load(q_row[None, :] + channel[:, None], mask=(kj < KROW)[:, None] & live[None, :], other=0.0)
            if K_GENERAL:
                x = x * (scale_log2 * down)
            else:
                x = x * (scale_log2 * down * (2.0 ** -(KB * (i // 2))))
            q_planes = q_planes + (tl.broadcast_to(x.to(tl.float16)[None, :, :], (W, KJ, R)),)
        for g in tl.static_range(GROUPS):
            inside = (c >= g * (HEAD // GROUPS)) & (c < (g + 1) * (HEAD // GROUPS))
            q_sums = q_sums + (tl.sum(tl.where(inside[None, :], q_all, 0.0), axis=1)[None, None, :],)
        score_scale = up * 16777216.0
        ku = 1.0
        vu = 1.0
        if META8:
            ku = tl.load(k_unit + head)
            vu = tl.load(v_unit + head)
        base_k = head.to(tl.int64) * head_k
        base_km = head.to(tl.int64) * head_km
        base_v = head.to(tl.int64) * head_v
        base_vm = head.to(tl.int64) * head_vm
        m = tl.full([W, R], float("-inf"), tl.float32)
        l = tl.zeros([W, R], tl.float32)
        v_max = tl.full([W, R], 1e-30, tl.float32)
        acc = ()
        mins = ()
        for _ in tl.static_range(NV):
            acc = acc + (tl.zeros([W, VJ, R], tl.float32),)
        for _ in tl.static_range(GROUPS):
            mins = mins + (tl.zeros([W, R], tl.float32),)
        edge = (h0 - t0) + (t1 - h1)
        for i in tl.range(0, edge, num_stages=1):
            tile = tl.where(i < h0 - t0, t0 + i, h1 + i - (h0 - t0))
            m, l, mins, v_max, acc = _int_tile(
                tile * TILE, q_planes, q_sums, m, l, mins, v_max, acc,
                k_codes, k_meta, v_codes, v_meta, ku, vu, table, base_k, base_km, base_v, base_vm,
                page_k, page_km, page_v, page_vm, score_scale, bias, position, live,
                window_row, window_line, from_window, from_sink, softcap_log2,
                True, SINK, RECENT, SLIDING, SOFTCAP, HEAD, KB, VB, GROUPS, META8,
                PAGE, WPAGE, RING, W, N, KJ, VJ, ASM, K_GENERAL, V_GENERAL,
            )  # fmt: skip
        # a row that saw nothing yet has a maximum of -inf, which the unmasked tiles never meet again
        for tile in tl.range(h0, h1, num_stages=STAGES):
            m, l, mins, v_max, acc = _int_tile(
                tile * TILE, q_planes, q_sums, m, l, mins, v_max, acc,
                k_codes, k_meta, v_codes, v_meta, ku, vu, table, base_k, base_km, base_v, base_vm,
                page_k, page_km, page_v, page_vm, score_scale, bias, position, live,
                window_row, window_line, from_window, from_sink, softcap_log2,
                False, SINK, RECENT, SLIDING, SOFTCAP, HEAD, KB, VB, GROUPS, META8,
                PAGE, WPAGE, RING, W, N, KJ, VJ, ASM, K_GENERAL, V_GENERAL,
            )  # fmt: skip

        # ---- merge the warps
        m_all = tl.max(m, axis=0)
        m_use = tl.where(m_all == float("-inf"), 0.0, m_all)
        weight = tl.exp2(m - m_use[None, :])
        total = tl.sum(l * weight, axis=0)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        vj = tl.arange(0, VJ)
        r = tl.arange(0, R)
        back = weight * v_max * (1024.0 * vu)
        if V_GENERAL:
            back = weight * (1.0 / 16384.0)
        for i in tl.static_range(NV):
            value = acc[i] * back[:, None, :]
            if not V_GENERAL:
                value = (
                    value * (2.0 ** -(VB * (i // 2)))
                    + (mins[((i // 2) * (HEAD * VB // 8)) // (HEAD // GROUPS)] * (weight * vu))[:, None, :]
                )
            o = tl.sum(value, axis=0) * inverse[None, :]
            channel = (i // 2) * (HEAD * VB // 8) + 2 * vj + i % 2
            tl.store(out_at + r[None, :] * HEAD + channel[:, None], o, mask=(vj < VROW)[:, None] & live[None, :])
        tl.store(lse_at, tl.where(total > 0, m_all + tl.log2(total), float("-inf")), mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
