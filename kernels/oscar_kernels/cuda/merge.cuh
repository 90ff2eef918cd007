// Rotation of the query, merge of the splits, rotation back.

#pragma once

#include "packed.cuh"

// Query rows to cache space, in place: q' = q R_K, a tensor-core product with R_K^T as A. `top`: largest magnitude in the
// rows; scaled by a power of two to below 2 they are exact in fp16, as bf16 has fewer bits.
__device__ __forceinline__ void rotate_rows(float (*sh_q)[D], const Params& p, int head, float top) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int each = (MTILES + WARPS - 1) / WARPS;
  const float back = __int_as_float(max(__float_as_int(top) & 0x7f800000, 0x01000000)), scale = 1.f / back;
  float turned[each][NT][4];
#pragma unroll
  for (int m = 0; m < each; ++m) {
    const int tile = min(warp + m * WARPS, MTILES - 1);
    const u16* matrix = p.k_turn + (i64)head * D * D + (tile * 16 + row) * D + quad * 8;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) turned[m][n][j] = 0.f;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const uint4 lo = __ldg((const uint4*)(matrix + c * 32)), hi = __ldg((const uint4*)(matrix + 8 * D + c * 32));
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float* q = sh_q[n * 8 + row] + c * 32 + quad * 8;
        const float4 x = *(const float4*)q, y = *(const float4*)(q + 4);
        mma_f16(turned[m][n], lo.x, hi.x, lo.y, hi.y, pack16(x.x * scale, x.y * scale), pack16(x.z * scale, x.w * scale));
        mma_f16(turned[m][n], lo.z, hi.z, lo.w, hi.w, pack16(y.x * scale, y.y * scale), pack16(y.z * scale, y.w * scale));
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < each; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (warp + m * WARPS < MTILES)
          sh_q[n * 8 + 2 * quad + j % 2][(warp + m * WARPS) * 16 + row + j / 2 * 8] = turned[m][n][j] * back;
  __syncthreads();
}

// The matrices of this head are on their way to L2 while the tables are read.
__device__ __forceinline__ void prefetch_matrix(const u16* matrix, int head) {
  const char* at = (const char*)(matrix + (i64)head * D * D);
  for (int i = threadIdx.x; i < D * D * 2 / 128; i += 32 * WARPS) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i * 128));
}

// Merge of the splits (unless this CTA did all), learned sinks, LSE, rotation back, output. `o`: the unnormalised rows
// when there is one split. `scratch`: one row set a warp, free. `back`: room for R_V^T, free.
__device__ __forceinline__ void finish(const Params& p, float (*o)[D], float (*scratch)[ROWS][D], u16* back, const float2* one,
                                       float* factor_of, const float* partial, const float* stats, int splits, int live,
                                       int row0, int q0, int head) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query_heads = p.heads * p.ratio;
  const u16* rotation = p.v_back + (i64)head * D * D;
  if (BACK_IN_SHARED && p.v_back) {  // on its way while the splits are merged
    for (int i = threadIdx.x; i < D * D / 8; i += 32 * WARPS) copy16(shared_address(back + 8 * i), rotation + 8 * i);
    commit();
  }
  float(*weight)[ROWS] = (float(*)[ROWS]) & scratch[0][0][0];  // [splits][ROWS]
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
  for (int i = threadIdx.x; i < live * D / 4; i += 32 * WARPS) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    float4 x = *(float4*)&o[r][c];
    if (splits > 1) {
      x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
      for (int s = 0; s < splits; ++s) {
        const float4 y = __ldcg((const float4*)(partial + (i64)s * (ROWS * D) + r * D + c));
        const float f = weight[s][r];
        x.x += y.x * f; x.y += y.y * f; x.z += y.z * f; x.w += y.w * f;
      }
    }
    const float f = factor_of[r];
    *(float4*)&o[r][c] = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
  }
  wait<0>();
  __syncthreads();
  if (p.v_back) {
    // o = o' R_V^T. A warp takes a share of the cache channels and all model channels, two a lane and pass.
    const u16* from = BACK_IN_SHARED ? back : rotation;
#pragma unroll
    for (int pass = 0; pass < D / 64; ++pass) {
      float sum[ROWS][2];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = 0.f;
#pragma unroll 8
      for (int e = warp * (D / WARPS); e < (warp + 1) * (D / WARPS); ++e) {
        const u32 raw = *(const u32*)(from + e * D + pass * 64 + lane * 2);
        const float lo = __int_as_float(raw << 16), hi = __int_as_float(raw & 0xffff0000u);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float x = o[r][e];  // rows from `live` on hold something finite
          sum[r][0] += x * lo;
          sum[r][1] += x * hi;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) *(float2*)&scratch[warp][r][pass * 64 + lane * 2] = make_float2(sum[r][0], sum[r][1]);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < live * D / 2; i += 32 * WARPS) {
    const int r = i / (D / 2), c = i % (D / 2) * 2;
    float2 x = *(float2*)&o[r][c];
    if (p.v_back) {
      x = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 y = *(float2*)&scratch[w][r][c];
        x.x += y.x;
        x.y += y.y;
      }
    }
    if (p.v_mean) { x.x += p.v_mean[head * D + c]; x.y += p.v_mean[head * D + c + 1]; }
    const int at = row0 + r;
    *(u32*)(p.out + ((i64)(q0 + at / p.ratio) * query_heads + head * p.ratio + at % p.ratio) * D + c) = OUT_BF16 ? packb16(x.x, x.y) : pack16(x.x, x.y);
  }
}
