// Attention on packed codes, in the rotated space of the cache. Codes are read as they lie and never written out.
//
// A threadgroup takes OSCAR_ROWS query rows of one KV head and one split of the keys; its four simdgroups take tiles of
// 32 keys in turn. For scores a lane owns a key, for the output pairs of channels. oscar_merge joins the splits.
//
// Compile-time settings: OSCAR_D head size (even), OSCAR_T element type of query and output, OSCAR_K_BITS, OSCAR_V_BITS
// 4 or 8, OSCAR_GROUP channels a scale, OSCAR_ROWS query rows a threadgroup.
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp math_mode(safe)

#define OSCAR_PAIRS (OSCAR_D / 2)
#define OSCAR_GROUPS (OSCAR_D / OSCAR_GROUP)
#define OSCAR_SLOTS ((OSCAR_PAIRS + 31) / 32)
#define OSCAR_SIMDGROUPS 4
#define OSCAR_TILE 32
#define OSCAR_RECORD (OSCAR_D + 2)
#define OSCAR_LEAST -3.0e38f

// Codes of channels 2 * pair and 2 * pair + 1 of one row.
static inline float2 oscar_pair_4(device const uchar* codes, long row, uint pair) {
    const int byte = int(codes[row * OSCAR_PAIRS + pair]);
    return float2(float(((byte & 15) ^ 8) - 8), float(((byte >> 4) ^ 8) - 8));
}

static inline float2 oscar_pair_8(device const uchar* codes, long row, uint pair) {
    const int low = int(codes[row * OSCAR_D + 2 * pair]);
    const int high = int(codes[row * OSCAR_D + 2 * pair + 1]);
    return float2(float((low ^ 128) - 128), float((high ^ 128) - 128));
}

#define OSCAR_JOIN_(A, B) A##B
#define OSCAR_JOIN(A, B) OSCAR_JOIN_(A, B)
#define OSCAR_K_PAIR OSCAR_JOIN(oscar_pair_, OSCAR_K_BITS)
#define OSCAR_V_PAIR OSCAR_JOIN(oscar_pair_, OSCAR_V_BITS)

// q        [batch * heads, rows, D] rotated, factors and softmax scale applied; row = new token * ratio + query head
// codes    [batch * heads, capacity, row bytes]; keys are rows first … first + keys, the last new_tokens of them new
// scales   [batch * heads, capacity, groups]
// mask     [batch, new_tokens, keys], not 0 where a query sees a key; one element when has_mask is 0
// partial  [batch * heads, splits, rows, D + 2]: sum of weighted values, maximum, total of the weights
kernel void oscar_attend(device const OSCAR_T* q [[buffer(0)]],
                         device const uchar* k_codes [[buffer(1)]],
                         device const half* k_scales [[buffer(2)]],
                         device const uchar* v_codes [[buffer(3)]],
                         device const half* v_scales [[buffer(4)]],
                         device const uchar* mask [[buffer(5)]],
                         device float* partial [[buffer(6)]],
                         constant long& heads [[buffer(7)]],
                         constant long& ratio [[buffer(8)]],
                         constant long& new_tokens [[buffer(9)]],
                         constant long& keys [[buffer(10)]],
                         constant long& first [[buffer(11)]],
                         constant long& capacity [[buffer(12)]],
                         constant long& window [[buffer(13)]],
                         constant long& split_keys [[buffer(14)]],
                         constant long& has_mask [[buffer(15)]],
                         constant float& softcap [[buffer(16)]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint3 groups [[threadgroups_per_grid]]) {
    threadgroup float query[OSCAR_ROWS][OSCAR_D];
    threadgroup float sums[OSCAR_SIMDGROUPS][OSCAR_ROWS][OSCAR_D];
    threadgroup float maxima[OSCAR_SIMDGROUPS][OSCAR_ROWS];
    threadgroup float totals[OSCAR_SIMDGROUPS][OSCAR_ROWS];
    const uint threads = OSCAR_SIMDGROUPS * OSCAR_TILE;
    const long rows = new_tokens * ratio;
    const long first_row = long(group.x) * OSCAR_ROWS;
    const long sequence = long(group.y);
    const long stored = sequence * capacity + first;  // row of the first key
    for (uint i = thread_index; i < OSCAR_ROWS * OSCAR_D; i += threads) {
        const long row = first_row + i / OSCAR_D;
        query[i / OSCAR_D][i % OSCAR_D] = row < rows ? float(q[(sequence * rows + row) * OSCAR_D + i % OSCAR_D]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float maximum[OSCAR_ROWS];
    float total[OSCAR_ROWS];
    float2 sum[OSCAR_ROWS][OSCAR_SLOTS];
    for (uint r = 0; r < OSCAR_ROWS; r++) {
        maximum[r] = OSCAR_LEAST;
        total[r] = 0.0f;
        for (uint s = 0; s < OSCAR_SLOTS; s++) {
            sum[r][s] = float2(0.0f, 0.0f);
        }
    }
    // Keys that some row of this threadgroup sees.
    const long history = keys - new_tokens;
    const long last_row = min(first_row + OSCAR_ROWS, rows) - 1;
    const long begin = max(long(group.z) * split_keys, window > 0 ? history + first_row / ratio - window + 1 : 0l);
    const long end = min(min((long(group.z) + 1) * split_keys, keys), history + last_row / ratio + 1);
    for (long tile = begin + long(simdgroup) * OSCAR_TILE; tile < end; tile += threads) {
        const long key = tile + lane;
        const bool inside = key < end;
        float score[OSCAR_ROWS];
        for (uint r = 0; r < OSCAR_ROWS; r++) {
            score[r] = 0.0f;
        }
        if (inside) {
            for (uint g = 0; g < OSCAR_GROUPS; g++) {
                float part[OSCAR_ROWS];
                for (uint r = 0; r < OSCAR_ROWS; r++) {
                    part[r] = 0.0f;
                }
                for (uint i = 0; i < OSCAR_GROUP / 2; i++) {
                    const uint pair = g * (OSCAR_GROUP / 2) + i;
                    const float2 code = OSCAR_K_PAIR(k_codes, stored + key, pair);
                    for (uint r = 0; r < OSCAR_ROWS; r++) {
                        part[r] += code.x * query[r][2 * pair] + code.y * query[r][2 * pair + 1];
                    }
                }
                const float scale = float(k_scales[(stored + key) * OSCAR_GROUPS + g]);
                for (uint r = 0; r < OSCAR_ROWS; r++) {
                    score[r] += part[r] * scale;
                }
            }
        }
        for (uint r = 0; r < OSCAR_ROWS; r++) {
            const long row = first_row + r;
            const long token = row / ratio;
            const long position = history + token;
            bool seen = inside && row < rows && key <= position && (window == 0 || key > position - window);
            if (seen && has_mask != 0) {
                seen = mask[((sequence / heads) * new_tokens + token) * keys + key] != 0;
            }
            if (softcap > 0.0f) {
                score[r] = softcap * tanh(score[r] / softcap);
            }
            const float highest = max(maximum[r], simd_max(seen ? score[r] : OSCAR_LEAST));
            const float correction = exp(maximum[r] - highest);
            score[r] = seen ? exp(score[r] - highest) : 0.0f;
            total[r] = total[r] * correction + simd_sum(score[r]);
            maximum[r] = highest;
            for (uint s = 0; s < OSCAR_SLOTS; s++) {
                sum[r][s] = sum[r][s] * correction;
            }
        }
        const uint count = uint(min(long(OSCAR_TILE), end - tile));
        for (uint j = 0; j < count; j++) {
            float weight[OSCAR_ROWS];
            for (uint r = 0; r < OSCAR_ROWS; r++) {
                weight[r] = simd_shuffle(score[r], ushort(j));
            }
            for (uint s = 0; s < OSCAR_SLOTS; s++) {
                const uint pair = s * OSCAR_TILE + lane;
                if (pair < OSCAR_PAIRS) {
                    const float scale = float(v_scales[(stored + tile + j) * OSCAR_GROUPS + 2 * pair / OSCAR_GROUP]);
                    const float2 code = OSCAR_V_PAIR(v_codes, stored + tile + j, pair) * scale;
                    for (uint r = 0; r < OSCAR_ROWS; r++) {
                        sum[r][s] += code * weight[r];
                    }
                }
            }
        }
    }
    for (uint r = 0; r < OSCAR_ROWS; r++) {
        for (uint s = 0; s < OSCAR_SLOTS; s++) {
            const uint pair = s * OSCAR_TILE + lane;
            if (pair < OSCAR_PAIRS) {
                sums[simdgroup][r][2 * pair] = sum[r][s].x;
                sums[simdgroup][r][2 * pair + 1] = sum[r][s].y;
            }
        }
        if (lane == 0) {
            maxima[simdgroup][r] = maximum[r];
            totals[simdgroup][r] = total[r];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < OSCAR_ROWS * OSCAR_D; i += threads) {
        const uint r = i / OSCAR_D;
        const uint channel = i % OSCAR_D;
        const long row = first_row + r;
        if (row < rows) {
            float highest = OSCAR_LEAST;
            for (uint s = 0; s < OSCAR_SIMDGROUPS; s++) {
                const float other = maxima[s][r];
                highest = max(highest, other);
            }
            float joined = 0.0f;
            float weight = 0.0f;
            for (uint s = 0; s < OSCAR_SIMDGROUPS; s++) {
                const float correction = exp(maxima[s][r] - highest);
                joined += sums[s][r][channel] * correction;
                weight += totals[s][r] * correction;
            }
            const long record = ((sequence * long(groups.z) + long(group.z)) * rows + row) * OSCAR_RECORD;
            partial[record + channel] = joined;
            if (channel == 0) {
                partial[record + OSCAR_D] = highest;
                partial[record + OSCAR_D + 1] = weight;
            }
        }
    }
}

// partial [sequences, splits, rows, D + 2] → out [sequences, rows, D]; a row that sees no key gives zeros.
kernel void oscar_merge(device const float* partial [[buffer(0)]],
                        device OSCAR_T* out [[buffer(1)]],
                        constant long& splits [[buffer(2)]],
                        constant long& rows [[buffer(3)]],
                        uint3 at [[thread_position_in_grid]]) {
    const long channel = long(at.x);
    const long row = long(at.y);
    const long sequence = long(at.z);
    float highest = OSCAR_LEAST;
    for (long s = 0; s < splits; s++) {
        highest = max(highest, partial[((sequence * splits + s) * rows + row) * OSCAR_RECORD + OSCAR_D]);
    }
    float joined = 0.0f;
    float weight = 0.0f;
    for (long s = 0; s < splits; s++) {
        const long record = ((sequence * splits + s) * rows + row) * OSCAR_RECORD;
        const float correction = exp(partial[record + OSCAR_D] - highest);
        joined += partial[record + channel] * correction;
        weight += partial[record + OSCAR_D + 1] * correction;
    }
    out[(sequence * rows + row) * OSCAR_D + channel] = OSCAR_T(weight > 0.0f ? joined / weight : 0.0f);
}
