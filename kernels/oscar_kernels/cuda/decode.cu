// Decode attention over a mixed-precision paged cache: INT2/INT4 history and 16-bit windows in one launch.
//
// Compiled by NVRTC or nvcc with -D of the macros below; no header is included. One CTA serves (split, KV head,
// request). Every warp walks its own blocks of TOKENS keys and keeps the packed codes in registers:
//
// * Codes become tensor-core operands without conversion. A 2-bit code masked in place inside a 16-bit lane *is* an
//   fp16 subnormal, code * 4^plane * 2^-24, exactly. 4^-plane is folded into the query (for K) or into the output
//   (for V), 2^24 into the score scale. Cost: one AND per two codes, one shift per sixteen.
// * mma.m16n8k16 with the codes as A: S = K q^T has tokens as rows and query heads as columns; movmatrix turns the
//   probabilities into the B operand of O^T = V^T P^T. Channel order inside a dot product is free, so lanes load
//   whole words and the query is gathered to match.
// * Scale and minimum act on scores and probabilities, never on elements:
//   q.x^ = s (q.c) + m sum(q)        sum_t p_t x^_t = sum_t (p_t s_t) c_t + sum_t p_t m_t
// * Probabilities times V's scale are kept in [0, 256] by a running power of two, so fp16 neither overflows nor
//   loses small weights.
//
// The last CTA of a (request, KV head) merges the splits, rotates back and writes the output: one launch in all.

#ifndef D
#define D 128        // head size: 64, 128 or 256
#define KB 2         // bits of K: 2 or 4
#define VB 2         // bits of V
#define NG 1         // groups a head: 1, 2 or 4 (at most 8 / bits)
#define META8 0      // 1: scale and minimum in FP8 e4m3, 0: fp16
#define WIN_BF16 1   // window type: 1 bf16, 0 fp16
#define OUT_BF16 1   // output type: 1 bf16, 0 fp16
#define NT 1         // tiles of 8 query rows a CTA
#define TOKENS 32    // keys a warp takes at a time; divides the page size
#define WARPS 4
#define SOFTCAP 0
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

struct Params {
  const float* q;            // [T, Hq, D], cache space
  const u8 *k_codes, *k_meta, *v_codes, *v_meta;  // sections of the first page of the first head
  const u16 *k_win, *v_win;  // window store, K and V of the first page of the first head
  const int* page_table;     // [B, page_cols]
  const int* window_table;   // [B, window_cols]; 0: not there
  const int* query_start;    // [B + 1]
  const int* lengths;        // [B], new tokens included; 0: padding
  const float *k_unit, *v_unit;  // [Hkv]
  const float* q_bias;       // [T, Hq] q . k_mean, or null
  const float* sinks;        // [Hq] learned sinks, or null
  const u16* v_back;         // [Hkv, D, D] bf16: R_V^T (row: cache channel, column: model channel), or null
  const float* v_mean;       // [Hkv, D] or null
  u16* out;                  // [T, Hq, D]
  float* lse;                // [T, Hq] natural log, or null
  float* partial;            // workspace: [B, Hkv, row tiles, splits, ROWS, D + 2]
  int* arrived;              // workspace: [B, Hkv, row tiles], zero before and after
  i64 page_stride, head_stride;              // bytes
  i64 win_page_stride, win_head_stride, win_token_stride;  // elements
  int page_cols, window_cols;
  int page_size, win_page_size;
  int heads, ratio;          // KV heads, query heads per KV head
  int sink, recent, sliding; // sliding: 0 for none
  int int_splits, win_splits;
  float scale, softcap;
};

#define ROWS (8 * NT)
#define KPER (8 / KB)
#define VPER (8 / VB)
#define KROW (D * KB / 8)
#define VROW (D * VB / 8)
#define NW (D * KB / 128)    // 32-bit words of K a lane and row
#define VL (D * VB / 128)    // 16-bit lanes of V a lane and token
#define VW ((VL + 1) / 2)    // 32-bit words of V a lane and token
#define KSTEPS (D / 16)
#define MTILES (D / 16)
#define TILES (TOKENS / 16)
#define LOG2E 1.4426950408889634f
#define NEG -1e30f

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float tanh_(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack16(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ u32 packb16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float half_to_float(u32 h) { float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f; }
__device__ __forceinline__ u32 transpose8x8(u32 x) { u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_win(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if WIN_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma_f16(c, a0, a1, a2, a3, b0, b1);
#endif
}
#if WIN_BF16
#define pack_win packb16
#else
#define pack_win pack16
#endif

// Streaming loads: every byte of the cache is read once.
__device__ __forceinline__ u32 ldg32(const void* p) { u32 r; asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(r) : "l"(p)); return r; }
__device__ __forceinline__ u32 ldg16(const void* p) { u16 r; asm("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(r) : "l"(p)); return r; }
template <int N> __device__ __forceinline__ void ldg(u32 (&r)[N], const void* p) {
  if constexpr (N == 1) r[0] = ldg32(p);
  else if constexpr (N == 2) asm("ld.global.nc.L1::no_allocate.v2.b32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
  else {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3]) : "l"((const u32*)p + i));
  }
}

#if META8
#define META_BYTES 2
// e4m3 shares fp16's layout seven bits down: exact for every finite value, subnormals included, up to the factor 256.
__device__ __forceinline__ float e4m3(u32 x) { return half_to_float(((x & 0x80u) << 8) | ((x & 0x7fu) << 7)) * 256.f; }
__device__ __forceinline__ void meta_pair(u32 raw, float unit, float& s, float& m) { s = e4m3(raw) * unit; m = e4m3(raw >> 8) * unit; }
#else
#define META_BYTES 4
__device__ __forceinline__ void meta_pair(u32 raw, float, float& s, float& m) { s = half_to_float(raw & 0xffffu); m = half_to_float(raw >> 16); }
#endif
// Metadata of one token: NG (scale, minimum) pairs.
struct Meta { u32 raw[NG]; };
__device__ __forceinline__ void load_meta(Meta& x, const u8* p) {
#if META8
#pragma unroll
  for (int g = 0; g < NG; ++g) x.raw[g] = ldg16(p + 2 * g);
#else
  ldg<NG>(x.raw, p);
#endif
}

// Softmax state of a warp: columns 2 (lane % 4) and + 1 of each row tile. `acc` is O^T in units of vref.
struct State {
  float acc[NT][MTILES][4];
  float m[NT][2], l[NT][2];
  float low[NT][NG][2];  // sum of p * minimum
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
      s.m[n][j] = NEG; s.l[n][j] = 0.f;
#pragma unroll
      for (int g = 0; g < NG; ++g) s.low[n][g][j] = 0.f;
    }
  }
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

// Raise the running maximum when a score exceeds it by more than 2^8 (p stays within fp16 until then), and the unit of
// the accumulators when V's scale exceeds it.
__device__ __forceinline__ void rescale(State& st, const float (&top)[NT][2], float& vref, float vmax) {
  bool grow = vmax > vref;
#pragma unroll
  for (int n = 0; n < NT; ++n) grow |= top[n][0] > st.m[n][0] + 8.f | top[n][1] > st.m[n][1] + 8.f;
  if (!__any_sync(~0u, grow)) return;
  float unit = 1.f;
  if (vmax > vref) {
    float next = __int_as_float((__float_as_int(vmax) & 0x7f800000) + 0x00800000);  // power of two above vmax
    unit = vref / next; vref = next;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float f[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = fmaxf(st.m[n][j], top[n][j]);
      f[j] = ex2(st.m[n][j] - m);
      st.m[n][j] = m; st.l[n][j] *= f[j];
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

__device__ __forceinline__ float finish_score(float x, float bias, const Params& p) {
#if SOFTCAP
  return p.softcap * LOG2E * tanh_((x + bias) * p.scale / p.softcap);
#else
  return (x + bias) * (p.scale * LOG2E);
#endif
}

struct Block { u32 k[TILES][2][NW]; u32 v[TILES][4][VW]; Meta km[TILES][2], vm[TILES][2]; };

__device__ __forceinline__ void load_block(Block& b, const Params& p, const int* table, int head, int key0, int row, int quad) {
  int page = table[key0 / p.page_size], slot = key0 % p.page_size;
  i64 base = (i64)page * p.page_stride + (i64)head * p.head_stride;
  const u8* kc = p.k_codes + base + (i64)slot * KROW;
  const u8* vc = p.v_codes + base + (i64)slot * VROW;
  const u8* km = p.k_meta + base + slot * (NG * META_BYTES);
  const u8* vm = p.v_meta + base + slot * (NG * META_BYTES);
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int token = t * 16 + row + 8 * r;
      ldg<NW>(b.k[t][r], kc + token * KROW + quad * (4 * NW));
      load_meta(b.km[t][r], km + token * (NG * META_BYTES));
      load_meta(b.vm[t][r], vm + token * (NG * META_BYTES));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int token = t * 16 + 2 * quad + (j & 1) + 8 * (j >> 1);
      const u8* at = vc + token * VROW + row * (2 * VL);
      if constexpr (VL == 1) b.v[t][j][0] = ldg16(at); else ldg<VW>(b.v[t][j], at);
    }
  }
}

#define KMASK(plane) ((KB == 2 ? 0x00030003u : 0x000f000fu) << ((plane) * KB))
#define VMASK(plane) ((VB == 2 ? 0x00030003u : 0x000f000fu) << ((plane) * VB))

// One block of packed keys. qf: query fragments, normalised; qmul: back to the query's scale (2^24 included);
// qsum: sum of the query over each group.
__device__ __forceinline__ void attend_block(State& st, float& vref, Block& b, const u32 (&qf)[NT][KSTEPS][2],
                                             const float (&qmul)[NT][2], const float (&qsum)[NT][NG][2], const Rows& rows,
                                             const Params& p, float k_unit, float v_unit, bool interior, int key0,
                                             int last_pos, const int* window_table, int row) {
  float s[NT][TILES][4];
  if (!interior) {  // what lies behind the end was never written: it must not reach a product, not even with weight 0
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (key0 + t * 16 + row + 8 * r > last_pos)
#pragma unroll
          for (int g = 0; g < NG; ++g) b.km[t][r].raw[g] = b.vm[t][r].raw[g] = 0;
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float dot[NT][NG][4];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int g = 0; g < NG; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) dot[n][g][j] = 0.f;
#pragma unroll
    for (int plane = 0; plane < KPER; ++plane)
#pragma unroll
      for (int w = 0; w < NW; ++w) {
        u32 lo = b.k[t][0][w], hi = b.k[t][1][w];
        u32 a0 = lo & KMASK(plane), a1 = hi & KMASK(plane);
        u32 a2 = (lo >> 8) & KMASK(plane), a3 = (hi >> 8) & KMASK(plane);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int i = plane * NW + w;
          mma_f16(dot[n][plane * NG / KPER], a0, a1, a2, a3, qf[n][i][0], qf[n][i][1]);
        }
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float scale[NG], low[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) meta_pair(b.km[t][r].raw[g], k_unit, scale[g], low[g]);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = 0.f;
#pragma unroll
          for (int g = 0; g < NG; ++g) x += dot[n][g][2 * r + j] * (scale[g] * qmul[n][j]) + low[g] * qsum[n][g][j];
          s[n][t][2 * r + j] = finish_score(x, rows.bias[n][j], p);
        }
    }
  }
  if (!interior) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int key = key0 + t * 16 + row + 8 * r;
        bool there = window_table[key / p.win_page_size] != 0;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            int pos = rows.pos[n][j];
            bool window = there & ((key < p.sink) | (key > pos - p.recent));
            bool seen = key <= pos & !window & !(p.sliding && key <= pos - p.sliding);
            if (!seen) s[n][t][2 * r + j] = NEG;
          }
      }
  }
  float top[NT][2], vmax = 0.f;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[n][j] = NEG;
#pragma unroll
      for (int t = 0; t < TILES; ++t) top[n][j] = fmaxf(top[n][j], fmaxf(s[n][t][j], s[n][t][2 + j]));
      top[n][j] = max_over_rows(top[n][j]);
    }
  float vs[TILES][2][NG], vl[TILES][2][NG];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int g = 0; g < NG; ++g) {
        meta_pair(b.vm[t][r].raw[g], v_unit, vs[t][r][g], vl[t][r][g]);
        vmax = fmaxf(vmax, vs[t][r][g]);
      }
  vmax = max_over_rows(vmax);
  rescale(st, top, vref, vmax);
  float inv = 1.f / vref;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    u32 pb[NT][NG][2];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float pr[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = s[n][t][2 * r + j];
          pr[j] = x > 0.5f * NEG ? ex2(x - st.m[n][j]) : 0.f;
          st.l[n][j] += pr[j];
#pragma unroll
          for (int g = 0; g < NG; ++g) st.low[n][g][j] += pr[j] * vl[t][r][g];
        }
#pragma unroll
        for (int g = 0; g < NG; ++g) {
          float f = vs[t][r][g] * inv;
          pb[n][g][r] = transpose8x8(pack16(pr[0] * f, pr[1] * f));
        }
      }
#pragma unroll
    for (int l = 0; l < VL; ++l) {
      // Token pairs (2q, 2q+1) and (2q+8, 2q+9) of 16-bit lane l side by side.
      u32 select = (l & 1) ? 0x7632u : 0x5410u;
      u32 x = prmt(b.v[t][0][l / 2], b.v[t][1][l / 2], select);
      u32 y = prmt(b.v[t][2][l / 2], b.v[t][3][l / 2], select);
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

// Sixteen window keys; the same scheme on 16-bit elements.
__device__ __forceinline__ void attend_window(State& st, float& vref, const u32 (&qf)[NT][KSTEPS][2], const Rows& rows,
                                              const Params& p, int head, int key0, int first_pos, int last_pos,
                                              const int* window_table, int row, int quad) {
  int page = window_table[key0 / p.win_page_size];
  if (page == 0) return;
  i64 base = (i64)page * p.win_page_stride + (i64)head * p.win_head_stride + (i64)(key0 % p.win_page_size) * p.win_token_stride;
  const u16 *k = p.k_win + base, *v = p.v_win + base;
  u32 kr[2][D / 8], vr[4][D / 16];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      u32 (&dst)[4] = *(u32(*)[4]) & kr[r][4 * c];
      ldg<4>(dst, k + (row + 8 * r) * p.win_token_stride + c * 32 + quad * 8);
    }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      u32 (&dst)[4] = *(u32(*)[4]) & vr[j][4 * c];
      ldg<4>(dst, v + (2 * quad + (j & 1) + 8 * (j >> 1)) * p.win_token_stride + c * 64 + row * 8);
    }
  // A key that no row sees may be another request's or was never written: it must not reach a product.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int key = key0 + 2 * quad + (j & 1) + 8 * (j >> 1);
    if (key > last_pos | (key >= p.sink & key <= first_pos - p.recent))
#pragma unroll
      for (int i = 0; i < D / 16; ++i) vr[j][i] = 0;
  }
  float s[NT][4], top[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float dot[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < KSTEPS; ++i) mma_win(dot, kr[0][2 * i], kr[1][2 * i], kr[0][2 * i + 1], kr[1][2 * i + 1], qf[n][i][0], qf[n][i][1]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int key = key0 + row + 8 * r, pos = rows.pos[n][j];
        bool seen = key <= pos & ((key < p.sink) | (key > pos - p.recent)) & !(p.sliding && key <= pos - p.sliding);
        s[n][2 * r + j] = seen ? finish_score(dot[2 * r + j], rows.bias[n][j], p) : NEG;
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) top[n][j] = max_over_rows(fmaxf(s[n][j], s[n][2 + j]));
  }
  rescale(st, top, vref, 0.f);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    u32 pb[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float pr[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float x = s[n][2 * r + j];
        pr[j] = x > 0.5f * NEG ? ex2(x - st.m[n][j]) : 0.f;
        st.l[n][j] += pr[j];
      }
      pb[r] = transpose8x8(pack_win(pr[0], pr[1]));
    }
#pragma unroll
    for (int i = 0; i < MTILES; ++i) {
      u32 a0 = prmt(vr[0][i], vr[1][i], 0x5410u), a1 = prmt(vr[0][i], vr[1][i], 0x7632u);
      u32 a2 = prmt(vr[2][i], vr[3][i], 0x5410u), a3 = prmt(vr[2][i], vr[3][i], 0x7632u);
      mma_win(st.acc[n][i], a0, a1, a2, a3, pb[0], pb[1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) oscar_decode(const __grid_constant__ Params p) {
  const int split = blockIdx.x, head = blockIdx.y % p.heads, row_tile = blockIdx.y / p.heads, request = blockIdx.z;
  const int length = p.lengths[request];
  const int q0 = p.query_start[request], queries = p.query_start[request + 1] - q0;
  const int total_rows = queries * p.ratio, row0 = row_tile * ROWS;
  if (length <= 0 || row0 >= total_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int splits = p.int_splits + p.win_splits;
  const int* page_table = p.page_table + (i64)request * p.page_cols;
  const int* window_table = p.window_table + (i64)request * p.window_cols;
  const bool packed = split < p.int_splits;

  __shared__ float sh_q[ROWS][D];
  __shared__ float sh_o[WARPS][ROWS][D + 2];
  __shared__ int sh_last;

  // Query rows to shared memory: row r is query r / ratio, head r % ratio of the group.
  for (int i = threadIdx.x; i < ROWS * D; i += 32 * WARPS) {
    int r = row0 + i / D;
    sh_q[i / D][i % D] = r < total_rows ? p.q[((i64)(q0 + r / p.ratio) * p.heads * p.ratio + head * p.ratio + r % p.ratio) * D + i % D] : 0.f;
  }
  __syncthreads();

  Rows rows;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int r = row0 + n * 8 + 2 * quad + j;
      rows.pos[n][j] = r < total_rows ? length - queries + r / p.ratio : -1;
      rows.bias[n][j] = p.q_bias && r < total_rows ? p.q_bias[(i64)(q0 + r / p.ratio) * p.heads * p.ratio + head * p.ratio + r % p.ratio] : 0.f;
    }
  const int first_pos = length - queries + row0 / p.ratio;
  const int last_row = (row0 + ROWS < total_rows ? row0 + ROWS : total_rows) - 1;
  const int last_pos = length - queries + last_row / p.ratio;
  const int start = p.sliding && first_pos - p.sliding + 1 > 0 ? first_pos - p.sliding + 1 : 0;

  State st;
  reset(st);
  float vref = 1.f;
  if (packed) {
    vref = 9.5367431640625e-7f;  // 2^-20: no smaller unit is needed
    u32 qf[NT][KSTEPS][2];
    float qmul[NT][2], qsum[NT][NG][2];
    {
      // Normalise each row to a largest magnitude of 1, lane pair by lane pair; a warp does all rows of its own use.
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float* q = sh_q[n * 8 + row];
        float top = 0.f, sum[NG];
#pragma unroll
        for (int g = 0; g < NG; ++g) sum[g] = 0.f;
#pragma unroll
        for (int c = 0; c < D / 4; ++c) {
          float x = q[c * 4 + quad];
          top = fmaxf(top, fabsf(x));
          sum[c * NG / (D / 4)] += x;
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, 1e-30f);
        float inv = 1.f / top;
#pragma unroll
        for (int g = 0; g < NG; ++g) { sum[g] += __shfl_xor_sync(~0u, sum[g], 1); sum[g] += __shfl_xor_sync(~0u, sum[g], 2); }
#pragma unroll
        for (int plane = 0; plane < KPER; ++plane)
#pragma unroll
          for (int w = 0; w < NW; ++w) {
            const float f = inv / (float)(1 << (plane * KB));
            const int at = plane * KROW + quad * (4 * NW) + 4 * w;
            qf[n][plane * NW + w][0] = pack16(q[at] * f, q[at + 2] * f);
            qf[n][plane * NW + w][1] = pack16(q[at + 1] * f, q[at + 3] * f);
          }
        // Column 2 quad + j of the scores is row 2 quad + j of the tile.
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int from = (2 * quad + j) * 4;
          qmul[n][j] = __shfl_sync(~0u, top, from) * 16777216.f;
#pragma unroll
          for (int g = 0; g < NG; ++g) qsum[n][g][j] = __shfl_sync(~0u, sum[g], from);
        }
      }
    }
    const float k_unit = META8 ? p.k_unit[head] : 1.f, v_unit = META8 ? p.v_unit[head] : 1.f;
    const int b0 = start / TOKENS, blocks = (last_pos + TOKENS) / TOKENS - b0;
    const int each = (blocks + p.int_splits - 1) / p.int_splits;
    const int from = b0 + split * each, to = min(from + each, b0 + blocks);
    // A block that only windows can serve is skipped when they are there.
    const int sink_end = p.sink, recent_start = last_pos - p.recent + 1;  // keys in between are packed for every row or masked
    auto windowed = [&](int block) {
      int lo = block * TOKENS, hi = lo + TOKENS - 1;
      if (!(hi < sink_end || lo >= recent_start)) return false;
      for (int key = lo; key <= hi && key <= last_pos; key += p.win_page_size < TOKENS ? p.win_page_size : TOKENS)
        if (window_table[key / p.win_page_size] == 0) return false;
      return true;
    };
    const int inner_lo = max(p.sink, last_pos - (p.sliding ? p.sliding : last_pos + 1) + 1), inner_hi = first_pos - p.recent;
    Block cur, nxt;
    int block = from + warp;
    while (block < to && windowed(block)) block += WARPS;
    if (block < to) load_block(nxt, p, page_table, head, block * TOKENS, row, quad);
    while (block < to) {
      cur = nxt;
      int next = block + WARPS;
      while (next < to && windowed(next)) next += WARPS;
      if (next < to) load_block(nxt, p, page_table, head, next * TOKENS, row, quad);
      int lo = block * TOKENS;
      bool interior = lo >= inner_lo && lo + TOKENS - 1 <= inner_hi;
      attend_block(st, vref, cur, qf, qmul, qsum, rows, p, k_unit, v_unit, interior, lo, last_pos, window_table, row);
      block = next;
    }
  } else {
    u32 qf[NT][KSTEPS][2];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < KSTEPS; ++i) {
        const float* q = sh_q[n * 8 + row] + (i / 2) * 32 + quad * 8 + (i % 2) * 4;
        qf[n][i][0] = pack_win(q[0], q[1]);
        qf[n][i][1] = pack_win(q[2], q[3]);
      }
    // Tiles of sixteen keys: the sink, then the recent range of any row.
    const int sink_hi = min(p.sink, last_pos + 1);
    const int sink_lo = start / 16, sink_tiles = sink_hi > start ? (sink_hi + 15) / 16 - sink_lo : 0;
    const int recent_lo = max(max(first_pos - p.recent + 1, sink_hi > start ? (sink_lo + sink_tiles) * 16 : 0), start) / 16;
    const int recent_tiles = max((last_pos + 16) / 16 - recent_lo, 0);
    const int stride = WARPS * p.win_splits;
    for (int i = (split - p.int_splits) * WARPS + warp; i < sink_tiles + recent_tiles; i += stride) {
      int tile = i < sink_tiles ? sink_lo + i : recent_lo + i - sink_tiles;
      attend_window(st, vref, qf, rows, p, head, tile * 16, first_pos, last_pos, window_table, row, quad);
    }
  }

  // Warp results to shared memory, in model units but rotated: [row][channel], then maximum and sum.
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* o = sh_o[warp][n * 8 + 2 * quad + j];
      float l = sum_over_rows(st.l[n][j]), low[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) low[g] = sum_over_rows(st.low[n][g][j]);
      if (packed) {
#pragma unroll
        for (int plane = 0; plane < VPER; ++plane)
#pragma unroll
          for (int v = 0; v < VL; ++v) {
            const float f = vref * (16777216.f / (float)(1 << (plane * VB)));
            const int at = plane * VROW + (row * VL + v) * 2;
            o[at] = st.acc[n][plane * VL + v][j] * f + low[plane * NG / VPER];
            o[at + 1] = st.acc[n][plane * VL + v][2 + j] * f + low[plane * NG / VPER];
          }
      } else {
#pragma unroll
        for (int i = 0; i < MTILES; ++i) {
          const int at = (i / 4) * 64 + row * 8 + (i % 4) * 2;
          o[at] = st.acc[n][i][j];
          o[at + 1] = st.acc[n][i][2 + j];
        }
      }
      if (row == 0) { o[D] = st.m[n][j]; o[D + 1] = l; }
    }
  __syncthreads();
  const i64 pair = ((i64)request * gridDim.y + blockIdx.y);
  float* mine = p.partial + (pair * splits + split) * (ROWS * (D + 2));
  const int live = min(ROWS, total_rows - row0);
  for (int i = threadIdx.x; i < live * D; i += 32 * WARPS) {
    int r = i / D, c = i % D;
    float m = NEG;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) m = fmaxf(m, sh_o[w][r][D]);
    float o = 0.f, l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float f = ex2(sh_o[w][r][D] - m);
      o += sh_o[w][r][c] * f;
      l += sh_o[w][r][D + 1] * f;
    }
    mine[r * (D + 2) + c] = o;
    if (c == 0) { mine[r * (D + 2) + D] = m; mine[r * (D + 2) + D + 1] = l; }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) sh_last = atomicAdd(p.arrived + pair, 1) == splits - 1;
  __syncthreads();
  if (!sh_last) return;
  __threadfence();

  // Merge of the splits, by the last CTA.
  const float* all = p.partial + pair * splits * (ROWS * (D + 2));
  float(*weight)[ROWS] = (float(*)[ROWS]) & sh_o[0][0][0];   // weights of a batch of splits
  float* total = &sh_q[0][0];                                // [ROWS][D]
  __shared__ float sh_l[ROWS];
  for (int r = warp; r < live; r += WARPS) {
    float m = NEG;
    for (int s = lane; s < splits; s += 32) m = fmaxf(m, __ldcg(all + (i64)s * (ROWS * (D + 2)) + r * (D + 2) + D));
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    float l = 0.f;
    for (int s = lane; s < splits; s += 32) {
      const float* x = all + (i64)s * (ROWS * (D + 2)) + r * (D + 2) + D;
      float f = ex2(__ldcg(x) - m);
      l += __ldcg(x + 1) * f;
      weight[s][r] = f;
    }
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    __syncwarp();
    if (lane == 0) {
      int at = row0 + r;
      if (p.sinks && at < total_rows) {
        float sink = p.sinks[head * p.ratio + at % p.ratio] * LOG2E, top = fmaxf(m, sink);
        l = l * ex2(m - top) + ex2(sink - top);
        float f = ex2(m - top);
        for (int s = 0; s < splits; ++s) weight[s][r] *= f;
        m = top;
      }
      sh_l[r] = l;
      if (p.lse && at < total_rows)
        p.lse[(i64)(q0 + at / p.ratio) * p.heads * p.ratio + head * p.ratio + at % p.ratio] = l > 0.f ? (m + lg2(l)) / LOG2E : __int_as_float(0xff800000);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < live * D; i += 32 * WARPS) {
    int r = i / D, c = i % D;
    float o = 0.f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) o += __ldcg(all + (i64)s * (ROWS * (D + 2)) + r * (D + 2) + c) * weight[s][r];
    total[i] = sh_l[r] > 0.f ? o / sh_l[r] : 0.f;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < live * D; i += 32 * WARPS) {
    int r = i / D, c = i % D;
    float o = total[i];
    if (p.v_back) {
      const u16* back = p.v_back + (i64)head * D * D + c;
      const float* x = total + r * D;
      o = 0.f;
#pragma unroll 32
      for (int e = 0; e < D; ++e) o += x[e] * __int_as_float((u32)__ldg(back + e * D) << 16);
    }
    if (p.v_mean) o += p.v_mean[head * D + c];
    int at = row0 + r;
    u32 bits = OUT_BF16 ? packb16(o, o) : pack16(o, o);
    p.out[((i64)(q0 + at / p.ratio) * p.heads * p.ratio + head * p.ratio + at % p.ratio) * D + c] = (u16)bits;
  }
  if (threadIdx.x == 0) p.arrived[pair] = 0;
}
