// Rotation of the query, merge of the splits, rotation back.

#pragma once

#include "packed.cuh"

// The matrices of this head are on their way to L2 while the tables are read.
__device__ __forceinline__ void prefetch_matrix(const u16* matrix, int head) {
  const char* at = (const char*)(matrix + (i64)head * D * D);
  for (int i = threadIdx.x; i < D * D * 2 / 128; i += 32 * WARPS) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i * 128));
}

// A head's rotation as A operand, one set of tiles of 16 rows a warp. Up to D = 128 it is loaded ahead; above, registers do
// not suffice, and it is read from L2 when it is needed.
#define TURN_TILES ((MTILES + WARPS - 1) / WARPS)
#define TURN_AHEAD (D <= 128)
struct Turn {
  uint4 lo[TURN_AHEAD ? TURN_TILES : 1][TURN_AHEAD ? D / 32 : 1], hi[TURN_AHEAD ? TURN_TILES : 1][TURN_AHEAD ? D / 32 : 1];
};

__device__ __forceinline__ void load_tile(uint4& lo, uint4& hi, const u16* matrix, int m, int c) {
  const int tile = min(threadIdx.x / 32 + m * WARPS, MTILES - 1), row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const u16* at = matrix + (tile * 16 + row) * D + c * 32 + quad * 8;
  lo = __ldg((const uint4*)at);
  hi = __ldg((const uint4*)(at + 8 * D));
}

__device__ __forceinline__ void load_turn(Turn& turn, const u16* matrix) {
  if constexpr (TURN_AHEAD) {
#pragma unroll
    for (int m = 0; m < TURN_TILES; ++m)
#pragma unroll
      for (int c = 0; c < D / 32; ++c) load_tile(turn.lo[m][c], turn.hi[m][c], matrix, m, c);
  }
}

// Rows x to M x, in place, on tensor cores. `top`: largest magnitude in the rows, which a power of two brings below 2. There
// bf16 values are exact in fp16, as they have fewer bits; with FULL what fp16 leaves of a value is a second operand.
template <bool FULL>
__device__ __forceinline__ void rotate_rows(float (*x)[D], Turn& turn, const u16* matrix, float top) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const float back = __int_as_float(max(__float_as_int(top) & 0x7f800000, 0x01000000)), scale = 1.f / back;
  float turned[TURN_TILES][NT][4];
#pragma unroll
  for (int m = 0; m < TURN_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) turned[m][n][j] = 0.f;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      uint4 lo, hi;
      if constexpr (TURN_AHEAD) lo = turn.lo[m][c], hi = turn.hi[m][c];
      else load_tile(lo, hi, matrix, m, c);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float* from = x[n * 8 + row] + c * 32 + quad * 8;
        float4 y = *(const float4*)from, z = *(const float4*)(from + 4);
        y = make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale);
        z = make_float4(z.x * scale, z.y * scale, z.z * scale, z.w * scale);
        mma_f16(turned[m][n], lo.x, hi.x, lo.y, hi.y, pack16(y.x, y.y), pack16(y.z, y.w));
        mma_f16(turned[m][n], lo.z, hi.z, lo.w, hi.w, pack16(z.x, z.y), pack16(z.z, z.w));
        if constexpr (FULL) {
          mma_f16(turned[m][n], lo.x, hi.x, lo.y, hi.y, pack16(rest16(y.x), rest16(y.y)), pack16(rest16(y.z), rest16(y.w)));
          mma_f16(turned[m][n], lo.z, hi.z, lo.w, hi.w, pack16(rest16(z.x), rest16(z.y)), pack16(rest16(z.z), rest16(z.w)));
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < TURN_TILES; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (warp + m * WARPS < MTILES)
          x[n * 8 + 2 * quad + j % 2][(warp + m * WARPS) * 16 + row + j / 2 * 8] = turned[m][n][j] * back;
  __syncthreads();
}

// Merge of the splits (unless this CTA did all), learned sinks, LSE, rotation back, output. `o`: the unnormalised rows
// when there is one split. `weight`: room for [splits][ROWS], free; `top_of`: for one value a warp.
__device__ __forceinline__ void finish(const Params& p, float (*o)[D], float (*weight)[ROWS], const float2* one,
                                       float* factor_of, float* top_of, const float* partial, const float* stats, int splits,
                                       int live, int row0, int q0, int head) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query_heads = p.heads * p.ratio;
  const u16* rotation = p.v_back + (i64)head * D * D;
  Turn turn;
  if (p.v_back) load_turn(turn, rotation);  // on its way while the splits are merged
  __syncthreads();
  for (int r = warp; r < live; r += WARPS) {
    float m = M_START, l = 0.f;
    if (splits == 1) {
      m = one[r].x;
      l = one[r].y;
    } else {
      float2 x[4];
      for (int s0 = 0; s0 < splits; s0 += 128) {
        float top = m;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int s = s0 + 32 * i + lane;
          x[i] = s < splits ? __ldcg((const float2*)(stats + s * (ROWS * 2) + 2 * r)) : make_float2(M_START, 0.f);
          top = fmaxf(top, x[i].x);
        }
        for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float f = ex2(m - top);
        l *= f;
        for (int s = lane; s < s0; s += 32) weight[s][r] *= f;
        m = top;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int s = s0 + 32 * i + lane;
          const float w = ex2(x[i].x - m);
          l += x[i].y * w;
          if (s < splits) weight[s][r] = w;
        }
      }
      for (int d = 16; d; d >>= 1) l += __shfl_xor_sync(~0u, l, d);
    }
    if (lane == 0) {
      const int q_head = head * p.ratio + (row0 + r) % p.ratio;
      float factor = 1.f;
      if (p.sinks) {
        const float sink = p.sinks[q_head] * LOG2E, top = fmaxf(m, sink);
        factor = ex2(m - top);
        l = l * factor + ex2(sink - top);
        m = top;
      }
      factor_of[r] = l > 0.f ? factor / l : 0.f;
      if (p.lse) p.lse[(i64)(q0 + (row0 + r) / p.ratio) * query_heads + q_head] = l > 0.f ? (m + lg2(l)) / LOG2E : __int_as_float(0xff800000);
    }
  }
  __syncthreads();
  float top = 0.f;
  for (int i = threadIdx.x; i < live * D / 4; i += 32 * WARPS) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    float4 x = *(float4*)&o[r][c];
    if (splits > 1) {
      x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
      for (int s = 0; s < splits; ++s) {
        const float4 y = __ldcg((const float4*)(partial + (i64)s * (ROWS * D) + r * D + c));
        const float f = weight[s][r];
        x.x += y.x * f; x.y += y.y * f; x.z += y.z * f; x.w += y.w * f;
      }
    }
    const float f = factor_of[r];
    x = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    *(float4*)&o[r][c] = x;
    top = fmaxf(fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
  }
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) top_of[warp] = top;
  __syncthreads();
  if (p.v_back) {  // rows from `live` on hold something finite
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, top_of[w]);
    rotate_rows<true>(o, turn, rotation, top);
  }
  for (int i = threadIdx.x; i < live * D / 2; i += 32 * WARPS) {
    const int r = i / (D / 2), c = i % (D / 2) * 2;
    float2 x = *(float2*)&o[r][c];
    if (p.v_mean) { x.x += p.v_mean[head * D + c]; x.y += p.v_mean[head * D + c + 1]; }
    const int at = row0 + r;
    *(u32*)(p.out + ((i64)(q0 + at / p.ratio) * query_heads + head * p.ratio + at % p.ratio) * D + c) = OUT_BF16 ? packb16(x.x, x.y) : pack16(x.x, x.y);
  }
}
