"""Reading a stretch of cached keys and values back into model space, and attention over the last few of them."""

import triton
import triton.language as tl

from oscar_kernels.triton.common_kernel import LOG2E, split_meta


@triton.jit
def _gather_one(
    codes, meta, unit, window, rotation, mean, page_row, window_row, out, first, count, out_row, head,
    page_c, head_c, page_m, head_m, win_page, win_head, win_token, out_token, out_head,
    HEAD: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, SINK: tl.constexpr, NEAR: tl.constexpr,
    HAS_MEAN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = HEAD // PER
    SIZE: tl.constexpr = HEAD // GROUPS
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    live = i < count
    key = first + i
    entry = tl.load(window_row + key // WPAGE, mask=live, other=0).to(tl.int64)
    if NEAR:
        near = live & (entry != 0)
    else:
        near = live & (entry != 0) & (key < SINK)
    packed = live & (near == 0)
    page = tl.load(page_row + key // PAGE, mask=packed, other=0).to(tl.int64)
    place = (key % PAGE).to(tl.int64)
    code_at = codes + page * page_c + head.to(tl.int64) * head_c + place * ROW
    meta_at = meta + page * page_m + head.to(tl.int64) * head_m + place * GROUPS
    win_at = window + entry * win_page + head.to(tl.int64) * win_head + (key % WPAGE) * win_token
    j = tl.arange(0, RP)
    c = tl.arange(0, DP)
    factor = 1.0
    if META8:
        factor = tl.load(unit + head)
    byte = tl.load(code_at[:, None] + j[None, :], mask=packed[:, None] & (j < ROW)[None, :], other=0).to(tl.int32)
    y = tl.zeros([BT, DP], tl.float32)
    for p in tl.static_range(PER):
        code = ((byte >> (BITS * p)) & ((1 << BITS) - 1)).to(tl.float32)
        group = tl.minimum((p * ROW + j) // SIZE, GROUPS - 1)
        if GROUPS == 1:
            pair = tl.load(meta_at, mask=packed, other=0)[:, None]
        else:
            pair = tl.load(meta_at[:, None] + group[None, :], mask=packed[:, None], other=0)
        scale, minimum = split_meta(pair, META8)
        x = (minimum + scale * code) * factor
        wide = tl.load(win_at[:, None] + (p * ROW + j)[None, :], mask=near[:, None] & (j < ROW)[None, :], other=0.0).to(
            tl.float32
        )
        x = tl.where(near[:, None], wide, x)
        x = tl.where((j < ROW)[None, :] & live[:, None], x, 0.0)
        # y[o] = sum_e x[e] rotation[o, e]
        back = tl.load(
            rotation + head * HEAD * HEAD + c[None, :] * HEAD + (p * ROW + j)[:, None],
            mask=(c < HEAD)[None, :] & (j < ROW)[:, None],
            other=0.0,
        )
        y = tl.dot(x, back, y, input_precision="tf32")
    if HAS_MEAN:
        y += tl.load(mean + head * HEAD + c, mask=c < HEAD, other=0.0)[None, :]
    at = (out_row + i).to(tl.int64) * out_token + head * out_head
    tl.store(out + at[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=live[:, None] & (c < HEAD)[None, :])


@triton.jit
def gather_kernel(
    k_codes, k_meta, v_codes, v_meta, k_unit, v_unit, k_win, v_win, q_rotation, v_rotation, k_mean, v_mean,
    page_table, window_table, starts, cu_keys, k_out, v_out, heads, page_stride, window_stride,
    page_k, head_k, page_km, head_km, page_v, head_v, page_vm, head_vm, win_page, win_head, win_token,
    out_token, out_head,
    HEAD: tl.constexpr, DP: tl.constexpr, KRP: tl.constexpr, VRP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    GROUPS: tl.constexpr, META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, SINK: tl.constexpr,
    NEAR: tl.constexpr, K_MEAN: tl.constexpr, V_MEAN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid ``(longest stretch / BT, requests, 2 * heads)``."""
    request = tl.program_id(1)
    head = tl.program_id(2) % heads
    out_row = tl.load(cu_keys + request)
    count = tl.load(cu_keys + request + 1) - out_row
    if tl.program_id(0) * BT >= count:
        return
    first = tl.load(starts + request)
    page_row = page_table + request.to(tl.int64) * page_stride
    window_row = window_table + request.to(tl.int64) * window_stride
    if tl.program_id(2) < heads:
        _gather_one(
            k_codes, k_meta, k_unit, k_win, q_rotation, k_mean, page_row, window_row, k_out, first, count, out_row,
            head,
            page_k, head_k, page_km, head_km, win_page, win_head, win_token, out_token, out_head,
            HEAD, DP, KRP, KB, GROUPS, META8, PAGE, WPAGE, SINK, NEAR, K_MEAN, BT,
        )  # fmt: skip
    else:
        _gather_one(
            v_codes, v_meta, v_unit, v_win, v_rotation, v_mean, page_row, window_row, v_out, first, count, out_row,
            head,
            page_v, head_v, page_vm, head_vm, win_page, win_head, win_token, out_token, out_head,
            HEAD, DP, VRP, VB, GROUPS, META8, PAGE, WPAGE, SINK, NEAR, V_MEAN, BT,
        )  # fmt: skip


@triton.jit
def near_kernel(
    q, k_far, v_far, k_near, v_near, query_start, context, starts, cu_keys, out, lse,
    ratio, tokens, scale_log2, softcap_log2, q_token, q_head, kv_token, kv_head, out_token, out_head,
    HEAD: tl.constexpr, DP: tl.constexpr, RECENT: tl.constexpr, SINK: tl.constexpr, FAR: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, SLIDING: tl.constexpr, RESUME: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend from the new tokens of each request to a stretch of keys.

    A key within ``RECENT`` of the query or below ``SINK`` is read from ``*_near``, another from ``*_far`` (not at all
    without ``FAR``). ``RESUME`` adds to what ``out`` and ``lse`` hold. Grid ``(longest query / BM, requests, heads)``.
    """
    request = tl.program_id(1)
    q_index = tl.program_id(2)
    head = q_index // ratio
    start = tl.load(query_start + request)
    queries = tl.load(query_start + request + 1) - start
    if tl.program_id(0) * BM >= queries:
        return
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    live = i < queries
    before = tl.load(context + request)
    first = tl.load(starts + request)
    row0 = tl.load(cu_keys + request)
    count = tl.load(cu_keys + request + 1) - row0
    position = before + i
    c = tl.arange(0, DP)
    inside = c < HEAD
    token = (start + i).to(tl.int64)
    x = tl.load(
        q + (token * q_token + q_index * q_head)[:, None] + c[None, :], mask=live[:, None] & inside[None, :], other=0.0
    )
    out_at = out + (token * out_token + q_index * out_head)[:, None] + c[None, :]
    lse_at = lse + q_index.to(tl.int64) * tokens + token
    if RESUME:
        m = tl.load(lse_at, mask=live, other=float("-inf")) * LOG2E
        l = tl.where(m > float("-inf"), 1.0, 0.0)
        acc = tl.load(out_at, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        acc = tl.where((l > 0)[:, None], acc, 0.0)
    else:
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
    begin = 0
    end = count
    if CAUSAL:  # keys that the block's last query sees
        end = tl.minimum(end, before + tl.minimum((tl.program_id(0) + 1) * BM, queries) - first)
    if SLIDING > 0:  # and its first
        begin = tl.maximum(before + tl.program_id(0) * BM - SLIDING + 1 - first, 0) // BN * BN
    for n0 in range(begin, end, BN):
        n = n0 + tl.arange(0, BN)
        there = n < count
        key = first + n
        at = (row0 + n).to(tl.int64) * kv_token + head * kv_head
        at2 = at[:, None] + c[None, :]
        mask2 = there[:, None] & inside[None, :]
        is_near = (key[None, :] > position[:, None] - RECENT) | (key < SINK)[None, :]
        k = tl.load(k_near + at2, mask=mask2, other=0.0)
        score = tl.dot(x, tl.trans(k), input_precision="tf32x3")
        seen = there[None, :] & live[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if SLIDING > 0:
            seen = seen & (key[None, :] > position[:, None] - SLIDING)
        if FAR:
            k = tl.load(k_far + at2, mask=mask2, other=0.0)
            score = tl.where(is_near, score, tl.dot(x, tl.trans(k), input_precision="tf32x3"))
        else:
            seen = seen & is_near
        score = score * scale_log2
        if SOFTCAP:
            z = score / softcap_log2
            e = tl.exp2(tl.abs(z) * (-2.0 * LOG2E))
            t = (1.0 - e) / (1.0 + e)
            score = softcap_log2 * tl.where(z < 0, -t, t)
        score = tl.where(seen, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_use)
        p = tl.exp2(score - m_use[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        v = tl.load(v_near + at2, mask=mask2, other=0.0)
        acc = tl.dot(tl.where(is_near, p, 0.0).to(v.dtype), v, acc, input_precision="tf32x3")
        if FAR:
            v = tl.load(v_far + at2, mask=mask2, other=0.0)
            acc = tl.dot(tl.where(is_near, 0.0, p).to(v.dtype), v, acc, input_precision="tf32x3")
        m = m_new
    some = l > 0
    acc = acc * tl.where(some, 1.0 / l, 0.0)[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
    tl.store(lse_at, tl.where(some, (m + tl.log2(l)) / LOG2E, float("-inf")), mask=live)
