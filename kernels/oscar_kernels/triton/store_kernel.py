"""Writing new K and V to both stores: the device code. Its bytes are those of the torch codec.

A program takes one KV head and a few tiles of tokens. The columns of the rotation are permuted when they are loaded, so
that a tile's rotated rows are the planes of the packed bytes one after the other (:func:`_channels`).
"""

import triton
import triton.language as tl

from oscar_kernels.triton.common_kernel import e4m3_to_f32, f32_to_e4m3

FLOAT16_MAX = tl.constexpr(65504.0)

#: Code from (value, minimum, 1 / scale), in units of 2**-BITS so that the clamp below 0 is the saturation of the
#: addition, and cut off (the floor) by adding 2**(23 - BITS) rounded toward zero: the code is in the low bits.
_ASM_CODE_2BIT = tl.constexpr(
    "{ .reg .f32 t; sub.rn.f32 t, $1, $2; mul.rn.f32 t, t, $3; mul.rn.f32 t, t, 0f3E800000;"
    " add.rn.sat.f32 t, t, 0f3E000000; min.f32 t, t, 0f3F600000; add.rz.f32 $0, t, 0f4A000000; }"
)
_ASM_CODE_4BIT = tl.constexpr(
    "{ .reg .f32 t; sub.rn.f32 t, $1, $2; mul.rn.f32 t, t, $3; mul.rn.f32 t, t, 0f3D800000;"
    " add.rn.sat.f32 t, t, 0f3D000000; min.f32 t, t, 0f3F780000; add.rz.f32 $0, t, 0f49000000; }"
)


@triton.jit
def _channels(ROW: tl.constexpr, RP: tl.constexpr, PER: tl.constexpr):
    """Channel of each column (plane ``p``, byte ``j``: ``p * ROW + j``), and which columns are no padding."""
    n = tl.arange(0, PER * RP)
    return (n // RP) * ROW + n % RP, (n % RP) < ROW


@triton.jit
def _rows(x, tile, tokens, x_token, column, real, BT: tl.constexpr):
    """Tokens of a tile as they are given, ``[BT, columns]``, 0 beyond the last."""
    row = tile * BT + tl.arange(0, BT)
    at = x + row.to(tl.int64) * x_token
    return tl.load(at[:, None] + column[None, :], mask=(row < tokens)[:, None] & real[None, :], other=0.0)


@triton.jit
def _matrix(rotation, first, c, channel, inside, HEAD: tl.constexpr):
    """Rows ``c`` of a head's matrix that begins at ``first``, columns permuted to ``channel``."""
    at = first + c[:, None] * HEAD + channel[None, :]
    return tl.load(rotation + at, mask=(c < HEAD)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _turn(y, rows, matrix, rest, center, PARTS: tl.constexpr, PRECISION: tl.constexpr, HAS_MEAN: tl.constexpr):
    """``y + rows @ (matrix + rest)``. The mean of 16-bit rows is the caller's, so that it does not round them."""
    if PARTS > 0:
        if matrix.dtype != rows.dtype:
            rows = tl.minimum(tl.maximum(rows.to(tl.float32), -FLOAT16_MAX), FLOAT16_MAX).to(matrix.dtype)
        y = tl.dot(rows, matrix, y)
        if PARTS == 2:
            y = tl.dot(rows, rest, y)
    else:
        rows = rows.to(tl.float32)
        if HAS_MEAN:
            rows = rows - center[None, :]
        y = tl.dot(rows, matrix, y, input_precision=PRECISION)
    return y


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _least(y, FAST: tl.constexpr):
    """Smallest value of each row, NaN where there is one."""
    if FAST:
        low = tl.reduce(y, 1, _lower)
    else:  # the interpreter takes a reduction of one's own element by element
        low = tl.where(tl.max((y != y).to(tl.int32), axis=1) > 0, float("nan"), tl.min(y, axis=1))
    return low


@triton.jit
def _extremes(
    y, channel, inside, SIZE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Smallest and largest value of each group, tuples of ``[tokens]``; the smallest is NaN where a value is."""
    lo = ()
    hi = ()
    for g in tl.static_range(GROUPS):
        if GROUPS == 1 and not PADDED:
            lo = lo + (_least(y, FAST),)
            hi = hi + (tl.max(y, axis=1),)
        else:
            own = ((channel // SIZE == g) & inside)[None, :]
            lo = lo + (_least(tl.where(own, y, float("inf")), FAST),)
            hi = hi + (tl.max(tl.where(own, y, float("-inf")), axis=1),)
    return lo, hi


@triton.jit
def _spread(values, channel, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """A value a group ``[tokens]`` as one a channel ``[tokens, channels]``, or ``[tokens, 1]`` for one group."""
    out = values[0][:, None]
    for g in tl.static_range(1, GROUPS):
        out = tl.where((channel // SIZE == g)[None, :], values[g][:, None], out)
    return out


@triton.jit
def _codes(y, minimum, inverse, BITS: tl.constexpr, ASM: tl.constexpr):
    """``clamp(floor((y - minimum) * inverse + 0.5))`` in the low ``BITS`` of an int32; the bits above mean nothing
    beyond the lowest byte, and are 0 in it."""
    if ASM:
        if BITS == 2:
            code = tl.inline_asm_elementwise(
                _ASM_CODE_2BIT, "=r,r,r,r", [y, minimum, inverse], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            code = tl.inline_asm_elementwise(
                _ASM_CODE_4BIT, "=r,r,r,r", [y, minimum, inverse], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        z = tl.floor((y - minimum) * inverse + 0.5)
        code = tl.minimum(tl.maximum(z, 0.0), ((1 << BITS) - 1) * 1.0).to(tl.int32)
    return code


@triton.jit
def _store_one(
    x, mean, rotation, shrink, unit, codes, meta, window, slots, window_slots, tokens, tile0, tiles, head, heads,
    x_token, x_head, page_c, head_c, page_m, head_m, win_page, win_head, win_token,
    HEAD: tl.constexpr, CHUNK: tl.constexpr, RP: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = HEAD // PER
    SIZE: tl.constexpr = HEAD // GROUPS
    TOP: tl.constexpr = (1 << BITS) - 1
    PADDED: tl.constexpr = RP != ROW
    WHOLE: tl.constexpr = CHUNK >= HEAD or not ROTATE
    channel, inside = _channels(ROW, RP, PER)
    c = tl.arange(0, CHUNK)
    j = tl.arange(0, RP)
    first = head * HEAD * HEAD
    second = first + heads * HEAD * HEAD
    factor = tl.load(shrink + head)
    center = 0
    if HAS_MEAN and not ROTATE:
        center = tl.load(mean + head * HEAD + channel, mask=inside, other=0.0)
    if HAS_MEAN and PARTS > 0:  # turned like the tokens, by what the matrix became in 16 bits
        center = tl.zeros([PER * RP], tl.float32)
        for c0 in range(0, HEAD, CHUNK):
            whole = _matrix(rotation, first, c0 + c, channel, inside, HEAD).to(tl.float32)
            if PARTS == 2:
                whole += _matrix(rotation, second, c0 + c, channel, inside, HEAD).to(tl.float32)
            side = tl.load(mean + head * HEAD + c0 + c, mask=c0 + c < HEAD, other=0.0)
            center += tl.sum(side[:, None] * whole, axis=0)
    elif HAS_MEAN and ROTATE and WHOLE:
        center = tl.load(mean + head * HEAD + c, mask=c < HEAD, other=0.0)
    matrix = 0
    rest = 0
    if ROTATE and WHOLE:
        if PARTS == 2:
            rest = _matrix(rotation, second, c, channel, inside, HEAD)
        matrix = _matrix(rotation, first, c, channel, inside, HEAD)
    if ROTATE:
        column, real = c, c < HEAD
    else:
        column, real = channel, inside
    x += head * x_head
    if WHOLE:
        ahead = _rows(x, tile0, tokens, x_token, column, real, BT)
    for tile in range(tile0, tile0 + tiles):
        row = tile * BT + tl.arange(0, BT)
        there = row < tokens
        window_slot = tl.load(window_slots + row, mask=there, other=-1)
        slot = tl.load(slots + row, mask=there, other=-1)
        if WHOLE:
            rows = ahead
            # The next tile is on its way while this one is worked on.
            ahead = _rows(x, tile + 1, tl.where(tile + 1 < tile0 + tiles, tokens, 0), x_token, column, real, BT)
            if ROTATE:
                y = tl.zeros([BT, PER * RP], tl.float32)
                y = _turn(y, rows, matrix, rest, center, PARTS, PRECISION, HAS_MEAN)
            else:
                y = rows.to(tl.float32)
        else:  # a matrix beyond shared memory comes from the L2 cache piece by piece
            y = tl.zeros([BT, PER * RP], tl.float32)
            for c0 in range(0, HEAD, CHUNK):
                rows = _rows(x, tile, tokens, x_token, c0 + c, c0 + c < HEAD, BT)
                piece = _matrix(rotation, first, c0 + c, channel, inside, HEAD)
                piece2 = piece
                if PARTS == 2:
                    piece2 = _matrix(rotation, second, c0 + c, channel, inside, HEAD)
                side = 0
                if PARTS == 0 and HAS_MEAN:
                    side = tl.load(mean + head * HEAD + c0 + c, mask=c0 + c < HEAD, other=0.0)
                y = _turn(y, rows, piece, piece2, side, PARTS, PRECISION, HAS_MEAN)
        if HAS_MEAN and (PARTS > 0 or not ROTATE):
            y = y - center[None, :]
        if tl.max(window_slot, axis=0) >= 0:  # few tiles of a long chunk have a token that stays in the window
            window_at = (
                window
                + (window_slot // WPAGE) * win_page
                + head.to(tl.int64) * win_head
                + (window_slot % WPAGE) * win_token
            )
            planes = tl.reshape(y, [BT, PER, RP])
            index = tl.arange(0, PER)[None, :, None]
            for p in tl.static_range(PER):  # plane by plane: a whole tile in shared memory would cost a program
                part = tl.sum(tl.where(index == p, planes, 0.0), axis=1)
                tl.store(
                    window_at[:, None] + (p * ROW + j)[None, :],
                    part.to(window.dtype.element_ty),
                    mask=(window_slot >= 0)[:, None] & (j < ROW)[None, :],
                )

        page = slot // PAGE
        place = slot % PAGE
        low, high = _extremes(y, channel, inside, SIZE, GROUPS, PADDED, ASM)
        odd = tl.zeros([BT], tl.int32)
        for g in tl.static_range(GROUPS):
            odd = odd | tl.where((low[g] >= -FLOAT16_MAX) & (high[g] <= FLOAT16_MAX), 0, 1)
        if tl.max(odd, axis=0) > 0:  # NaN or beyond float16
            y = tl.where(y != y, 0.0, y)
            y = tl.minimum(tl.maximum(y, -FLOAT16_MAX), FLOAT16_MAX)
            low, high = _extremes(y, channel, inside, SIZE, GROUPS, PADDED, ASM)
        meta_at = meta + page * page_m + head.to(tl.int64) * head_m + place * GROUPS
        minima = ()
        inverses = ()
        for g in tl.static_range(GROUPS):
            lo = low[g] * factor
            hi = high[g] * factor
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
                word = scale16.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                word = word | (lo16.to(tl.int16, bitcast=True).to(tl.int32) << 16)
            tl.store(meta_at + g, word, mask=slot >= 0)
            one = tl.full([BT], 1.0, tl.float32)
            safe = tl.where(scale > 0, scale, 1.0)
            minima = minima + (lo,)
            inverses = inverses + (tl.where(scale > 0, tl.div_rn(one, safe), 0.0),)
        code = _codes(y, _spread(minima, channel, SIZE, GROUPS), _spread(inverses, channel, SIZE, GROUPS), BITS, ASM)
        shift = (tl.arange(0, PER) * BITS)[None, :, None]
        packed = tl.sum(tl.reshape(code, [BT, PER, RP]) << shift, axis=1)
        code_at = codes + page * page_c + head.to(tl.int64) * head_c + place * ROW
        tl.store(code_at[:, None] + j[None, :], packed.to(tl.uint8), mask=(slot >= 0)[:, None] & (j < ROW)[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles"])
def store_kernel(
    k, v, k_mean, v_mean, k_rotation, v_rotation, k_shrink, v_shrink, k_unit, v_unit,
    k_codes, k_meta, v_codes, v_meta, k_win, v_win, slots, window_slots, tokens, tiles,
    k_token, k_head, v_token, v_head,
    page_k, head_k, page_km, head_km, page_v, head_v, page_vm, head_vm, win_page, win_head, win_token,
    HEAD: tl.constexpr, CHUNK: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, KRP: tl.constexpr, VRP: tl.constexpr,
    GROUPS: tl.constexpr, META8: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr,
    K_MEAN: tl.constexpr, V_MEAN: tl.constexpr, K_ROTATE: tl.constexpr, V_ROTATE: tl.constexpr,
    K_PARTS: tl.constexpr, V_PARTS: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid ``(tokens / (BT * tiles), heads, 2)``: K and V in one launch."""
    tile0 = tl.program_id(0) * tiles
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    if tl.program_id(2) == 0:
        _store_one(
            k, k_mean, k_rotation, k_shrink, k_unit, k_codes, k_meta, k_win, slots, window_slots, tokens, tile0, tiles,
            head, heads,
            k_token, k_head, page_k, head_k, page_km, head_km, win_page, win_head, win_token,
            HEAD, CHUNK, KRP, KB, GROUPS, META8, PAGE, WPAGE, K_MEAN, K_ROTATE, K_PARTS, PRECISION, BT, ASM,
        )  # fmt: skip
    else:
        _store_one(
            v, v_mean, v_rotation, v_shrink, v_unit, v_codes, v_meta, v_win, slots, window_slots, tokens, tile0, tiles,
            head, heads,
            v_token, v_head, page_v, head_v, page_vm, head_vm, win_page, win_head, win_token,
            HEAD, CHUNK, VRP, VB, GROUPS, META8, PAGE, WPAGE, V_MEAN, V_ROTATE, V_PARTS, PRECISION, BT, ASM,
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
