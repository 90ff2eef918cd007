// Sink and recent keys in 16 bits.

#pragma once

#include "state.cuh"

// Sixteen window keys; the same scheme on 16-bit elements.
__device__ __forceinline__ void attend_window(State& st, const float (*sh_q)[D], const Rows& rows, const Params& p, int head,
                                              int key0, int first_pos, int last_pos, const int* window_table, int row, int quad) {
  int page = window_table[key0 / WPAGE];
  if (page == 0) return;
  i64 base = (i64)page * p.win_page_stride + (i64)head * p.win_head_stride + (i64)(key0 % WPAGE) * p.win_token_stride;
  const u16 *k = p.k_win + base, *v = p.v_win + base;
  u32 kr[2][D / 8], vr[4][MTILES];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      u32 (&dst)[4] = *(u32(*)[4]) & kr[r][4 * c];
      ldg<4>(dst, k + (row + 8 * r) * p.win_token_stride + c * 32 + quad * 8);
    }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int key = key0 + 2 * quad + (j & 1) + 8 * (j >> 1);
    const u16* from = v + (key - key0) * p.win_token_stride + row * (2 * VL);
#pragma unroll
    for (int plane = 0; plane < VPER; ++plane) {
      u32 (&dst)[VL] = *(u32(*)[VL]) & vr[j][plane * VL];
      ldg<VL>(dst, from + plane * VROW);
    }
    // A key that no row sees may be another request's or was never written: it must not reach a product.
    if (key > last_pos | (key >= p.sink & key <= first_pos - p.recent))
#pragma unroll
      for (int i = 0; i < MTILES; ++i) vr[j][i] = 0;
  }
  float s[NT][4], top[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float dot[4] = {0.f, 0.f, 0.f, 0.f}, rest[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < KSTEPS; ++i) {
      u32 b0, b1, r0, r1;
      const float4 q = *(const float4*)(sh_q[n * 8 + row] + (i / 2) * 32 + quad * 8 + (i % 2) * 4);
      split_win(q.x, q.y, b0, r0);
      split_win(q.z, q.w, b1, r1);
      mma_win(dot, kr[0][2 * i], kr[1][2 * i], kr[0][2 * i + 1], kr[1][2 * i + 1], b0, b1);
      mma_win(rest, kr[0][2 * i], kr[1][2 * i], kr[0][2 * i + 1], kr[1][2 * i + 1], r0, r1);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int key = key0 + row + 8 * r, pos = rows.pos[n][j];
        bool seen = key <= pos & ((key < p.sink) | (key > pos - p.recent)) & !(p.sliding && key <= pos - p.sliding);
        s[n][2 * r + j] = seen ? finish_score((dot[2 * r + j] + rest[2 * r + j]) * (SOFTCAP ? p.scale : p.scale * LOG2E), rows.bias[n][j], p) : NEG;
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) top[n][j] = fmaxf(s[n][j], s[n][2 + j]);
  }
  rescale(st, top, 0.f);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    u32 pb[2], rest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float pr[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        pr[j] = ex2(s[n][2 * r + j] - st.m[n][j]);
        st.l[n][j] += pr[j];
      }
      split_win(pr[0], pr[1], pb[r], rest[r]);
      pb[r] = transpose8x8(pb[r]);
      rest[r] = transpose8x8(rest[r]);
    }
#pragma unroll
    for (int i = 0; i < MTILES; ++i) {
      const u32 a0 = prmt(vr[0][i], vr[1][i], 0x5410u), a1 = prmt(vr[0][i], vr[1][i], 0x7632u);
      const u32 a2 = prmt(vr[2][i], vr[3][i], 0x5410u), a3 = prmt(vr[2][i], vr[3][i], 0x7632u);
      mma_win(st.acc[n][i], a0, a1, a2, a3, pb[0], pb[1]);
      mma_win(st.acc[n][i], a0, a1, a2, a3, rest[0], rest[1]);
    }
  }
}
