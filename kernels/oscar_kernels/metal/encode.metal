// Fused encode: signs, real FFT, per-channel factors, group abs-max, rounding, packing. One threadgroup a vector.
//
// Compile-time settings (defined before this text): OSCAR_D head size (even, at most 512), OSCAR_T element type of the
// input, OSCAR_BITS 4 or 8, OSCAR_GROUP channels a scale (16 or 32), OSCAR_ROTATE 0 where the input is rotated already.
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

#define OSCAR_HALF (OSCAR_D / 2)
#define OSCAR_LEVEL ((1 << (OSCAR_BITS - 1)) - 1)
#define OSCAR_FLOAT16_MAX 65504.0f

static inline float oscar_clean(float x) {
    return x != x ? 0.0f : clamp(x, -OSCAR_FLOAT16_MAX, OSCAR_FLOAT16_MAX);
}

static inline float2 oscar_multiply(float2 a, float2 b) {
    return float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}

// x              [batch * heads * tokens, D]
// signs          [D] +1 or -1
// inverse_factor [heads, D]
// roots          [D] exp(-2 pi i j / D)
// codes, scales  [batch * heads, capacity, row]: token t of this call goes to row first + t
kernel void oscar_encode(device const OSCAR_T* x [[buffer(0)]],
                         device const float* signs [[buffer(1)]],
                         device const float* inverse_factor [[buffer(2)]],
                         device const float2* roots [[buffer(3)]],
                         device uchar* codes [[buffer(4)]],
                         device half* scales [[buffer(5)]],
                         constant long& tokens [[buffer(6)]],
                         constant long& heads [[buffer(7)]],
                         constant long& capacity [[buffer(8)]],
                         constant long& first [[buffer(9)]],
                         uint t [[thread_position_in_threadgroup]],
                         uint row_index [[threadgroup_position_in_grid]]) {
    const long sequence = long(row_index) / tokens;  // batch * heads + head
    const long token = long(row_index) % tokens;
    const long source = long(row_index) * OSCAR_D + 2 * t;
    float even = oscar_clean(float(x[source]));
    float odd = oscar_clean(float(x[source + 1]));
#if OSCAR_ROTATE
    // A real FFT of D points is a complex one of D / 2 on (even, odd) pairs. Stockham stages: thread t makes element t
    // of each; radix 2 while the length is even, then one stage for the odd rest (3 for 96, 5 for 80).
    threadgroup float2 line[2][OSCAR_HALF];
    line[0][t] = float2(even * signs[2 * t], odd * signs[2 * t + 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint side = 0;
    uint stride = 1;
    for (uint length = OSCAR_HALF; length > 1;) {
        const uint radix = length % 2 == 0 ? 2 : length;
        const uint quotient = length / radix;
        const uint q = t % stride;
        const uint p = t / stride / radix;
        const uint k = t / stride % radix;
        float2 sum = line[side][q + stride * p];
        for (uint j = 1; j < radix; j++) {
            const float2 term = line[side][q + stride * (p + quotient * j)];
            sum += oscar_multiply(term, roots[2 * (OSCAR_HALF / radix) * (j * k % radix)]);
        }
        line[1 - side][t] = oscar_multiply(sum, roots[2 * (p * k * stride % OSCAR_HALF)]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        side = 1 - side;
        stride *= radix;
        length = quotient;
    }
    const float2 a = line[side][t];
    const float2 b = line[side][t == 0 ? 0 : OSCAR_HALF - t];
    if (t == 0) {  // the mean and the Nyquist term
        const float factor = 1.0f / sqrt(float(OSCAR_D));
        even = (a.x + a.y) * factor;
        odd = (a.x - a.y) * factor;
    } else {  // transform of the even inputs plus the turned one of the odd inputs
        const float factor = sqrt(2.0f / float(OSCAR_D));
        const float2 of_even = float2(a.x + b.x, a.y - b.y) * 0.5f;
        const float2 of_odd = float2(a.y + b.y, b.x - a.x) * 0.5f;
        const float2 spectrum = of_even + oscar_multiply(of_odd, roots[t]);
        even = spectrum.x * factor;
        odd = spectrum.y * factor;
    }
#endif
    const long channel = (sequence % heads) * OSCAR_D + 2 * t;
    even *= inverse_factor[channel];
    odd *= inverse_factor[channel + 1];
    float largest = max(fabs(even), fabs(odd));
    for (ushort mask = 1; mask < OSCAR_GROUP / 2; mask *= 2) {
        largest = max(largest, simd_shuffle_xor(largest, mask));
    }
    const half scale = half(min(largest / float(OSCAR_LEVEL), OSCAR_FLOAT16_MAX));
    const float step = float(scale);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const float level = float(OSCAR_LEVEL);
    const int low = int(clamp(floor(even * inverse + 0.5f), -level, level));
    const int high = int(clamp(floor(odd * inverse + 0.5f), -level, level));
    const long row = sequence * capacity + first + token;
#if OSCAR_BITS == 4
    codes[row * OSCAR_HALF + t] = uchar((low & 15) | ((high & 15) << 4));
#else
    codes[row * OSCAR_D + 2 * t] = uchar(low & 255);
    codes[row * OSCAR_D + 2 * t + 1] = uchar(high & 255);
#endif
    if (2 * t % OSCAR_GROUP == 0) {
        scales[row * (OSCAR_D / OSCAR_GROUP) + 2 * t / OSCAR_GROUP] = scale;
    }
}
