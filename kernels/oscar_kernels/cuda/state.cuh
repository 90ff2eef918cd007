// Softmax state of a warp.

#pragma once

#include "ptx.cuh"

// Softmax state of a warp: columns 2 (lane % 4) and + 1 of each row tile. While packed keys are read, `acc` is O^T in
// units of vref * 2^24 / 2^(plane * VB), vref a power of two above every scale of V so far.
struct State {
  float acc[NT][MTILES][4];
  float m[NT][2], l[NT][2];
  float low[NT][NG][2];  // sum of p * minimum
  float vref, vinv;
};

__device__ __forceinline__ void reset(State& s) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < MTILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s.acc[n][i][j] = 0.f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      s.m[n][j] = M_START; s.l[n][j] = 0.f;
#pragma unroll
      for (int g = 0; g < NG; ++g) s.low[n][g][j] = 0.f;
    }
  }
  s.vref = VREF_START;
  s.vinv = 1.f / VREF_START;
}

__device__ __forceinline__ float max_over_rows(float x) {  // over lane / 4
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
__device__ __forceinline__ float sum_over_rows(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// Raise the running maximum only when a score exceeds it by more than 2^8 (p stays within fp16 until then), and the
// unit of the accumulators only when a scale of V exceeds it: rare after the first blocks, one vote otherwise.
__device__ __forceinline__ void rescale(State& st, float (&top)[NT][2], float vmax) {
  bool grow = vmax > st.vref;
#pragma unroll
  for (int n = 0; n < NT; ++n) grow |= top[n][0] > st.m[n][0] + 8.f | top[n][1] > st.m[n][1] + 8.f;
  if (!__any_sync(~0u, grow)) return;
  float unit = 1.f;
  vmax = max_over_rows(vmax);
  if (vmax > st.vref) {
    float next = __int_as_float((__float_as_int(vmax) & 0x7f800000) + 0x00800000);  // power of two above vmax
    unit = st.vref * (1.f / next);
    st.vref = next;
    st.vinv = 1.f / next;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float f[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = fmaxf(st.m[n][j], max_over_rows(top[n][j]));
      f[j] = ex2(st.m[n][j] - m);
      st.m[n][j] = m;
      st.l[n][j] *= f[j];
#pragma unroll
      for (int g = 0; g < NG; ++g) st.low[n][g][j] *= f[j];
      f[j] *= unit;
    }
#pragma unroll
    for (int i = 0; i < MTILES; ++i) {
      st.acc[n][i][0] *= f[0]; st.acc[n][i][1] *= f[1]; st.acc[n][i][2] *= f[0]; st.acc[n][i][3] *= f[1];
    }
  }
}

struct Rows {  // what this lane's two columns of each row tile are
  int pos[NT][2];    // query position, -1: no such row
  float bias[NT][2];
};

// `x` and `bias` already carry the scale; without softcap also log2(e).
__device__ __forceinline__ float finish_score(float x, float bias, const Params& p) {
#if SOFTCAP
  return p.softcap * LOG2E * tanh_((x + bias) / p.softcap);
#else
  return x + bias;
#endif
}
