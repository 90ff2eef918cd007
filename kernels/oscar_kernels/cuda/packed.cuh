// Packed keys: a ring of blocks in shared memory, their scores, and their product with the probabilities.

#pragma once

#include "state.cuh"

// A stage of a warp's ring: K codes, V codes, K metadata, V metadata of TOKENS keys.
#define K_BYTES (TOKENS * KROW)
#define V_BYTES (TOKENS * VROW)
#define M_BYTES (TOKENS * NG * META_BYTES)
#define STAGE_BYTES (K_BYTES + V_BYTES + 2 * M_BYTES)
#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
// Afterwards the same memory holds the warps' results.
#define RESULT_BYTES (WARPS * ROWS * D * 4)
#define SHARED_BYTES (ROWS * D * 4 + (RING_BYTES > RESULT_BYTES ? RING_BYTES : RESULT_BYTES))

extern "C" __device__ const int oscar_shared_bytes = SHARED_BYTES;  // for the launcher

struct Source { const u8 *k, *v, *km, *vm; };  // this head's sections in page 0

__device__ __forceinline__ void fetch(u32 stage, const Source& from, i64 page, int slot, int lane) {
  const u8 *k = from.k + page + slot * KROW, *v = from.v + page + slot * VROW;
  const u8 *km = from.km + page + slot * (NG * META_BYTES), *vm = from.vm + page + slot * (NG * META_BYTES);
#pragma unroll
  for (int c = 0; c < K_BYTES; c += 512)
    if (K_BYTES % 512 == 0 || c + lane * 16 < K_BYTES) copy16(stage + c + lane * 16, k + c + lane * 16);
#pragma unroll
  for (int c = 0; c < V_BYTES; c += 512)
    if (V_BYTES % 512 == 0 || c + lane * 16 < V_BYTES) copy16(stage + K_BYTES + c + lane * 16, v + c + lane * 16);
#pragma unroll
  for (int c = 0; c < M_BYTES; c += 256) {
    const int at = c + lane % 16 * 16;
    if (M_BYTES % 256 == 0 || at < M_BYTES) copy16(stage + K_BYTES + V_BYTES + (lane < 16 ? 0 : M_BYTES) + at, (lane < 16 ? km : vm) + at);
  }
}

// Which token of eight the row of a fragment is: rows 2q and 2q + 1 are tokens q and q + 4, so that the lanes of one
// load of V touch 32 different banks.
__device__ __forceinline__ int token_of(int row) { return row / 2 + row % 2 * 4; }

#define KMASK(plane) ((KB == 2 ? 0x00030003u : 0x000f000fu) << ((plane) * KB))
#define VMASK(plane) ((VB == 2 ? 0x00030003u : 0x000f000fu) << ((plane) * VB))

typedef float Scores[NT][TILES][4];

// Scores of one block. qf: query fragments, normalised; qmul: back to the query's scale (2^24 and the softmax scale
// included); qsum: scaled sum of the query over each group.
__device__ __forceinline__ void score_block(Scores& s, const u8* stage, const u32 (&qf)[NT][KSTEPS][2],
                                            const float (&qmul)[NT][2], const float (&qsum)[NT][NG][2], const Rows& rows,
                                            const Params& p, float k_unit, int token, int quad) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    u32 code[2][NW];
    Meta meta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lds<NW>(code[r], stage + (t * 16 + 8 * r + token) * KROW + quad * (4 * NW));
      load_meta(meta[r], stage + K_BYTES + V_BYTES + (t * 16 + 8 * r + token) * (NG * META_BYTES));
    }
    float dot[NT][NG][2][4];  // two chains a group: half the latency
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int g = 0; g < NG; ++g)
#pragma unroll
        for (int j = 0; j < 8; ++j) dot[n][g][j / 4][j % 4] = 0.f;
#pragma unroll
    for (int plane = 0; plane < KPER; ++plane)
#pragma unroll
      for (int w = 0; w < NW; ++w) {
        u32 lo = code[0][w], hi = code[1][w];
        u32 a0 = lo & KMASK(plane), a1 = hi & KMASK(plane);
        u32 a2 = (lo >> 8) & KMASK(plane), a3 = (hi >> 8) & KMASK(plane);
        const int i = plane * NW + w;
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_f16(dot[n][plane * NG / KPER][i & 1], a0, a1, a2, a3, qf[n][i][0], qf[n][i][1]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float scale[NG], low[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) meta_pair(meta[r].raw[g], k_unit, scale[g], low[g]);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = rows.bias[n][j];
#pragma unroll
          for (int g = 0; g < NG; ++g) x += low[g] * qsum[n][g][j] + (dot[n][g][0][2 * r + j] + dot[n][g][1][2 * r + j]) * (scale[g] * qmul[n][j]);
          s[n][t][2 * r + j] = finish_score(x, 0.f, p);
        }
    }
  }
}

// Scores of keys that this store does not serve, or that a row does not see.
__device__ __forceinline__ void mask_block(Scores& s, const Rows& rows, const Params& p, int key0, int last_pos,
                                           const int* window_table, int token) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key0 + t * 16 + 8 * r + token;
      const bool there = key <= last_pos && window_table[key / WPAGE] != 0;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int pos = rows.pos[n][j];
          const bool window = there & ((key < p.sink) | (key > pos - p.recent));
          if (key > pos | window | (p.sliding && key <= pos - p.sliding)) s[n][t][2 * r + j] = NEG;
        }
    }
}

// Probabilities of a block and their product with V. `end`: keys of the block from there on were never written; their
// metadata must not reach a product, not even with weight 0.
__device__ __forceinline__ void mix_block(State& st, Scores& s, const u8* stage, float v_unit, int end, int token, int row, int quad) {
  float top[NT][2], vmax = 0.f, vs[TILES][2][NG], vl[TILES][2][NG];
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[n][j] = s[n][0][j];
#pragma unroll
      for (int t = 0; t < TILES; ++t) top[n][j] = fmaxf(top[n][j], fmaxf(s[n][t][j], s[n][t][2 + j]));
    }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r)
    {
      const int at = t * 16 + 8 * r + token;
      Meta meta;
      load_meta(meta, stage + K_BYTES + V_BYTES + M_BYTES + at * (NG * META_BYTES));
#pragma unroll
      for (int g = 0; g < NG; ++g) {
        meta_pair(at < end ? meta.raw[g] : 0, v_unit, vs[t][r][g], vl[t][r][g]);
        vmax = fmaxf(vmax, vs[t][r][g]);
      }
    }
  rescale(st, top, vmax);
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    u32 pb[NT][NG][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float f[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) f[g] = vs[t][r][g] * st.vinv;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float pr[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          pr[j] = ex2(s[n][t][2 * r + j] - st.m[n][j]);
          st.l[n][j] += pr[j];
#pragma unroll
          for (int g = 0; g < NG; ++g) st.low[n][g][j] += pr[j] * vl[t][r][g];
        }
#pragma unroll
        for (int g = 0; g < NG; ++g) pb[n][g][r] = transpose8x8(pack16(pr[0] * f[g], pr[1] * f[g]));
      }
    }
    u32 code[4][VW];  // rows 2 quad, 2 quad + 1, and the same of the upper eight
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u8* at = stage + K_BYTES + (t * 16 + quad + j % 2 * 4 + j / 2 * 8) * VROW + row * (2 * VL);
      if constexpr (VL == 1) code[j][0] = *(const u16*)at; else lds<VW>(code[j], at);
    }
#pragma unroll
    for (int l = 0; l < VL; ++l) {
      // 16-bit lane l of two tokens side by side.
      const u32 select = (l & 1) ? 0x7632u : 0x5410u;
      u32 x = prmt(code[0][l / 2], code[1][l / 2], select);
      u32 y = prmt(code[2][l / 2], code[3][l / 2], select);
#pragma unroll
      for (int plane = 0; plane < VPER; ++plane) {
        u32 a0 = x & VMASK(plane), a1 = (x >> 8) & VMASK(plane), a2 = y & VMASK(plane), a3 = (y >> 8) & VMASK(plane);
        const int g = plane * NG / VPER;
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_f16(st.acc[n][plane * VL + l], a0, a1, a2, a3, pb[n][g][0], pb[n][g][1]);
      }
    }
  }
}

// Accumulators to true units, the minima's share added, so that windows can follow.
__device__ __forceinline__ void settle(State& st) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float low[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) low[g] = sum_over_rows(st.low[n][g][j]);
#pragma unroll
      for (int plane = 0; plane < VPER; ++plane)
#pragma unroll
        for (int l = 0; l < VL; ++l) {
          const float f = st.vref * (16777216.f / (float)(1 << (plane * VB)));
          float(&a)[4] = st.acc[n][plane * VL + l];
          a[j] = a[j] * f + low[plane * NG / VPER];
          a[2 + j] = a[2 + j] * f + low[plane * NG / VPER];
        }
    }
}
