// Decode attention over a mixed-precision paged cache: INT2/INT4 history and 16-bit windows in one launch.
//
// Compiled by NVRTC or nvcc with -D of the macros below; no header is included. One CTA serves (split, KV head,
// request). Every warp walks its own blocks of TOKENS keys, which cp.async brings into its own ring of STAGES stages of
// shared memory: no barrier between warps, and enough bytes in flight to saturate the memory.
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
// Packed keys and windows accumulate into the same registers: both V tiles use the channel order of the packed planes.

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
#define PAGE 128     // tokens of a packed page, a power of two
#define WPAGE 16     // tokens of a window page, a power of two
#define WARPS 4
#define SOFTCAP 0
#define MIN_CTAS 4   // CTAs a multiprocessor that registers must allow
#define STAGES 4     // blocks of keys in flight a warp
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

struct Params {
  const float* q;            // [T, Hq, D], cache space; null: q16 is rotated here
  const u16* q16;            // [T, Hq, D] bf16, model space
  const u16* k_turn;         // [Hkv, D, D] fp16: R_K^T (row: cache channel)
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
  float* partial;            // workspace: [B, Hkv * row tiles, splits, ROWS, D] outputs
  float* stats;              // workspace: [B, Hkv * row tiles, splits, ROWS, 2] maximum (base 2), sum
  int* arrived;              // workspace: [B, Hkv * row tiles], zero before and after
  i64 q_stride;                              // elements from token to token
  i64 page_stride, head_stride;              // bytes
  i64 win_page_stride, win_head_stride, win_token_stride;  // elements
  int page_cols, window_cols;
  int heads, ratio;          // KV heads, query heads per KV head
  int sink, recent, sliding; // sliding: 0 for none
  int splits;                // CTAs a (request, KV head, row tile) at most
  int thin;                  // of which one a multiprocessor; 0 when there are more pairs than multiprocessors
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
#define NEG -1e30f       // a masked score
#define M_START -1e29f   // a maximum before any score: ex2(NEG - M_START) is 0
#define VREF_START 9.5367431640625e-7f  // 2^-20

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 - 2 / (1 + e^2x): absolute error 1e-7, where tanh.approx has 5e-4.
__device__ __forceinline__ float tanh_(float x) { return 1.f - __fdividef(2.f, 1.f + ex2(2.f * 1.4426950408889634f * x)); }
__device__ __forceinline__ u32 pack16(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ u32 packb16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float half_to_float(u32 h) { float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f; }
__device__ __forceinline__ u32 transpose8x8(u32 x) { u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#if WIN_BF16
#define pack_win packb16
#define mma_win mma_bf16
__device__ __forceinline__ float low_of(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __int_as_float(x & 0xffff0000u); }
#else
#define pack_win pack16
#define mma_win mma_f16
__device__ __forceinline__ float low_of(u32 x) { return half_to_float(x & 0xffffu); }
__device__ __forceinline__ float high_of(u32 x) { return half_to_float(x >> 16); }
#endif
// A pair of floats as the sum of two 16-bit pairs: window keys are few, so exactness costs little.
__device__ __forceinline__ void split_win(float a, float b, u32& hi, u32& lo) {
  hi = pack_win(a, b);
  lo = pack_win(a - low_of(hi), b - high_of(hi));
}

__device__ __forceinline__ void copy16(u32 to_shared, const void* from) { asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared), "l"(from)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Adds 1 once all that this CTA wrote (before a barrier) is visible to the GPU; sees what earlier adders published.
__device__ __forceinline__ int arrive(int* counter) { int old; asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory"); return old; }

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
// Shared-memory words of one lane.
template <int N> __device__ __forceinline__ void lds(u32 (&r)[N], const u8* p) {
  if constexpr (N == 1) r[0] = *(const u32*)p;
  else if constexpr (N == 2) { const uint2 x = *(const uint2*)p; r[0] = x.x; r[1] = x.y; }
  else {
#pragma unroll
    for (int i = 0; i < N; i += 4) { const uint4 x = *(const uint4*)(p + 4 * i); r[i] = x.x; r[i + 1] = x.y; r[i + 2] = x.z; r[i + 3] = x.w; }
  }
}
struct Meta { u32 raw[NG]; };  // (scale, minimum) of each group of one token
__device__ __forceinline__ void load_meta(Meta& x, const u8* p) {
#if META8
#pragma unroll
  for (int g = 0; g < NG; ++g) x.raw[g] = *(const u16*)(p + 2 * g);
#else
  lds<NG>(x.raw, p);
#endif
}

// A stage of a warp's ring: K codes, V codes, K metadata, V metadata of TOKENS keys.
#define K_BYTES (TOKENS * KROW)
#define V_BYTES (TOKENS * VROW)
#define M_BYTES (TOKENS * NG * META_BYTES)
#define STAGE_BYTES (K_BYTES + V_BYTES + 2 * M_BYTES)
#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
// Afterwards the same memory holds the warps' results and, where it fits, R_V^T.
#define RESULT_BYTES (WARPS * ROWS * D * 4)
#define BACK_IN_SHARED (D <= 128)
#define SHARED_BYTES (ROWS * D * 4 + (RING_BYTES > RESULT_BYTES + BACK_IN_SHARED * D * D * 2 ? RING_BYTES : RESULT_BYTES + BACK_IN_SHARED * D * D * 2))

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

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) oscar_decode(const __grid_constant__ Params p) {
  const int split = blockIdx.x, head = blockIdx.y % p.heads, row_tile = blockIdx.y / p.heads, request = blockIdx.z;
  if (p.k_turn) prefetch_matrix(p.k_turn, head);
  if (p.v_back && split == 0) prefetch_matrix(p.v_back, head);
  const int length = p.lengths[request];
  const int q0 = p.query_start[request], queries = p.query_start[request + 1] - q0;
  const int total_rows = queries * p.ratio, row0 = row_tile * ROWS;
  if (length <= 0 || row0 >= total_rows) return;
  const int live = min(ROWS, total_rows - row0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int query_heads = p.heads * p.ratio;
  const int* page_table = p.page_table + (i64)request * p.page_cols;
  const int* window_table = p.window_table + (i64)request * p.window_cols;

  extern __shared__ __align__(128) u8 shared[];
  float(*sh_q)[D] = (float(*)[D])shared;
  u8* ring = shared + ROWS * D * 4 + warp * (STAGES * STAGE_BYTES);
  float(*sh_o)[ROWS][D] = (float(*)[ROWS][D])(shared + ROWS * D * 4);
  __shared__ float sh_m[WARPS][ROWS], sh_l[WARPS][ROWS];
  __shared__ float sh_top[WARPS];
  __shared__ float2 sh_one[ROWS];  // maximum and sum when there is one split
  __shared__ int sh_last;

  // Positions of this CTA's rows, and the packed keys that any of them reads.
  const int first_pos = length - queries + row0 / p.ratio;
  const int last_pos = length - queries + (row0 + live - 1) / p.ratio;
  const int start = p.sliding && first_pos - p.sliding + 1 > 0 ? first_pos - p.sliding + 1 : 0;
  const int recent_lo = max(first_pos - p.recent + 1, start);
  // Blocks of packed keys that only this store serves, when every window page is there; the rest in a second pass.
  const int lo_key = max(start, p.sink), hi_key = last_pos - p.recent;
  const int b0 = lo_key / TOKENS, blocks = hi_key >= lo_key ? hi_key / TOKENS + 1 - b0 : 0;
  // How many CTAs share the work follows from the length: the grid is fixed, those beyond leave. With CTAs to spare some
  // take the windows alone; otherwise every one takes a share of them.
  int splits = min(p.splits, max(1, (blocks + WARPS - 1) / WARPS)), windows = 0;
  if (p.thin) {
    const int deep = blocks <= 2 * WARPS * p.thin ? 1 : blocks <= 8 * WARPS * p.thin ? 2 : MIN_CTAS;
    splits = min(p.splits, deep * p.thin);
    windows = min(deep == 1 ? (p.sink + p.recent + 16 * WARPS - 1) / (16 * WARPS) : 1, splits / 3);
  }
  if (split >= splits) return;
  const int int_splits = splits - windows;
  const int each = (blocks + int_splits - 1) / int_splits;
  const int from = b0 + min(split * each, blocks), to = split < int_splits ? min(from + each, b0 + blocks) : from;

  const i64 head_at = (i64)head * p.head_stride;
  const Source source = {p.k_codes + head_at, p.v_codes + head_at, p.k_meta + head_at, p.v_meta + head_at};
  const u32 ring_at = shared_address(ring);
  // Page ids of a warp's next 32 blocks, one a lane.
  auto pages_from = [&](int block, int end, int step) {
    const int mine = block + lane * step;
    return mine < end ? page_table[mine * TOKENS / PAGE] : 0;
  };
  int ids = pages_from(from + warp, to, WARPS);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {  // on their way while the query is prepared
    const int block = from + warp + i * WARPS;
    const i64 page = (i64)__shfl_sync(~0u, ids, i) * p.page_stride;
    if (block < to) fetch(ring_at + i * STAGE_BYTES, source, page, block * TOKENS % PAGE, lane);
    commit();
  }
  // Query row r is query r / ratio, head r % ratio of the group.
  float top = 0.f;
  for (int i = threadIdx.x; i < ROWS * D; i += 32 * WARPS) {
    int r = row0 + i / D;
    const i64 at = (q0 + r / p.ratio) * p.q_stride + (head * p.ratio + r % p.ratio) * D + i % D;
    const float x = r >= total_rows ? 0.f : p.q ? p.q[at] : __int_as_float((u32)p.q16[at] << 16);
    sh_q[i / D][i % D] = x;
    top = fmaxf(top, fabsf(x));
  }
  const int part = windows ? split - int_splits : split, parts = windows ? windows : splits;
  bool whole = true;  // every window page that a row would read is there
  if (part >= 0) {
    for (int c = start / WPAGE + threadIdx.x; c <= (min(p.sink, length) - 1) / WPAGE; c += 32 * WARPS) whole &= window_table[c] != 0;
    for (int c = recent_lo / WPAGE + threadIdx.x; c <= last_pos / WPAGE; c += 32 * WARPS) whole &= window_table[c] != 0;
  }
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) sh_top[warp] = top;
  whole = __syncthreads_and(whole);
  if (!p.q) {
    top = sh_top[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, sh_top[w]);
    rotate_rows(sh_q, p, head, top);
  }

  Rows rows;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int r = row0 + n * 8 + 2 * quad + j;
      rows.pos[n][j] = r < total_rows ? length - queries + r / p.ratio : -1;
      rows.bias[n][j] = 0.f;
      if (p.q_bias && r < total_rows)
        rows.bias[n][j] = p.q_bias[(i64)(q0 + r / p.ratio) * query_heads + head * p.ratio + r % p.ratio] * (SOFTCAP ? p.scale : p.scale * LOG2E);
    }

  State st;
  reset(st);
  if (from < to || !whole) {
    u32 qf[NT][KSTEPS][2];
    float qmul[NT][2], qsum[NT][NG][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      // Each row normalised to a largest magnitude of 1: fp16 is then exact enough whatever the query's scale.
      const float* q = sh_q[n * 8 + row];
      float top = 1e-30f, sum[NG];
#pragma unroll
      for (int g = 0; g < NG; ++g) sum[g] = 0.f;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        const float4 x = *(const float4*)(q + c * 16 + quad * 4);
        top = fmaxf(fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
        sum[c * NG / (D / 16)] += x.x + x.y + x.z + x.w;
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
      for (int g = 0; g < NG; ++g) { sum[g] += __shfl_xor_sync(~0u, sum[g], 1); sum[g] += __shfl_xor_sync(~0u, sum[g], 2); }
      const float inv = 1.f / top;
#pragma unroll
      for (int plane = 0; plane < KPER; ++plane)
#pragma unroll
        for (int w = 0; w < NW; ++w) {
          const float f = inv / (float)(1 << (plane * KB));
          const float4 x = *(const float4*)(q + plane * KROW + quad * (4 * NW) + 4 * w);
          qf[n][plane * NW + w][0] = pack16(x.x * f, x.z * f);
          qf[n][plane * NW + w][1] = pack16(x.y * f, x.w * f);
        }
      // Column 2 quad + j of the scores is row 2 quad + j of the tile.
      const float scale = SOFTCAP ? p.scale : p.scale * LOG2E;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int source = (2 * quad + j) * 4;
        qmul[n][j] = __shfl_sync(~0u, top, source) * (16777216.f * scale);
#pragma unroll
        for (int g = 0; g < NG; ++g) qsum[n][g][j] = __shfl_sync(~0u, sum[g], source) * scale;
      }
    }
    const float k_unit = META8 ? p.k_unit[head] : 1.f, v_unit = META8 ? p.v_unit[head] : 1.f;
    const int inner_lo = max(p.sink, p.sliding ? last_pos - p.sliding + 1 : 0), inner_hi = first_pos - p.recent - TOKENS + 1;
    const int token = token_of(row);
    // Pass 0: the keys of this split. Passes 1 and 2, when window pages are missing: blocks before and behind.
    for (int pass = 0; pass < (whole ? 1 : 3); ++pass) {
      int first = from + warp, end = to, step = WARPS;
      if (pass) {
        const int lo = pass == 1 ? start / TOKENS : max(b0 + blocks, start / TOKENS);
        end = pass == 1 ? min(b0, last_pos / TOKENS + 1) : last_pos / TOKENS + 1;
        first = lo + part * WARPS + warp;
        step = WARPS * parts;
        ids = pages_from(first, end, step);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
          const i64 page = (i64)__shfl_sync(~0u, ids, i) * p.page_stride;
          if (first + i * step < end) fetch(ring_at + i * STAGE_BYTES, source, page, (first + i * step) * TOKENS % PAGE, lane);
          commit();
        }
      }
      int stage = 0;
      for (int i = 0, block = first; block < end; ++i, block += step) {
        wait<STAGES - 2>();
        __syncwarp();
        const u8* keys = ring + stage * STAGE_BYTES;
        const int key0 = block * TOKENS, ahead = block + (STAGES - 1) * step;
        if ((i + STAGES - 1) % 32 == 0) ids = pages_from(ahead, end, step);
        const i64 page = (i64)__shfl_sync(~0u, ids, (i + STAGES - 1) % 32) * p.page_stride;
        // The stage read last time is free: every lane has passed the barrier above.
        const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
        if (ahead < end) fetch(ring_at + free_stage * STAGE_BYTES, source, page, ahead * TOKENS % PAGE, lane);
        commit();
        Scores s;
        score_block(s, keys, qf, qmul, qsum, rows, p, k_unit, token, quad);
        if (key0 < inner_lo | key0 > inner_hi) mask_block(s, rows, p, key0, last_pos, window_table, token);
        mix_block(st, s, keys, v_unit, last_pos + 1 - key0, token, row, quad);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
      }
      wait<0>();
      __syncwarp();
    }
    settle(st);
  }
  {
    // Window tiles of sixteen keys: the sink's, then those of the recent range of any row.
    const int sink_hi = min(p.sink, last_pos + 1);
    const int sink_lo = start / 16, sink_tiles = sink_hi > start ? (sink_hi + 15) / 16 - sink_lo : 0;
    const int lo = max(recent_lo / 16, sink_tiles ? sink_lo + sink_tiles : 0), recent_tiles = max(last_pos / 16 + 1 - lo, 0);
    if (part >= 0)
      for (int i = part * WARPS + warp; i < sink_tiles + recent_tiles; i += WARPS * parts)
        attend_window(st, sh_q, rows, p, head, (i < sink_tiles ? sink_lo + i : lo + i - sink_tiles) * 16, first_pos, last_pos,
                      window_table, row, quad);
  }

  // Merge of the warps: rows of channels, maximum and sum.
  __syncthreads();  // the ring is no longer needed
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = n * 8 + 2 * quad + j;
      float l = sum_over_rows(st.l[n][j]);
#pragma unroll
      for (int plane = 0; plane < VPER; ++plane)
#pragma unroll
        for (int v = 0; v < VL; ++v)
          *(float2*)&sh_o[warp][r][plane * VROW + (row * VL + v) * 2] = make_float2(st.acc[n][plane * VL + v][j], st.acc[n][plane * VL + v][2 + j]);
      if (row == 0) { sh_m[warp][r] = st.m[n][j]; sh_l[warp][r] = l; }
    }
  __syncthreads();
  const i64 pair = (i64)request * gridDim.y + blockIdx.y;
  float* partial = p.partial + pair * p.splits * (ROWS * D);
  float* stats = p.stats + pair * p.splits * (ROWS * 2);
  for (int i = threadIdx.x; i < live * D / 4; i += 32 * WARPS) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    float m = M_START, l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) m = fmaxf(m, sh_m[w][r]);
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = ex2(sh_m[w][r] - m);
      const float4 x = *(const float4*)&sh_o[w][r][c];
      o.x += x.x * f; o.y += x.y * f; o.z += x.z * f; o.w += x.w * f;
      l += sh_l[w][r] * f;
    }
    if (splits == 1) {
      *(float4*)&sh_q[r][c] = o;  // the query is no longer needed
    } else {
      __stcg((float4*)(partial + (i64)split * (ROWS * D) + r * D + c), o);
    }
    if (c == 0) {
      if (splits > 1) __stcg((float2*)(stats + split * (ROWS * 2) + 2 * r), make_float2(m, l));
      else sh_one[r] = make_float2(m, l);
    }
  }
  if (splits > 1) {
    __syncthreads();
    if (threadIdx.x == 0) sh_last = arrive(p.arrived + pair) == splits - 1;
    __syncthreads();
    if (!sh_last) return;
  }
  finish(p, sh_q, sh_o, (u16*)(shared + ROWS * D * 4 + RESULT_BYTES), sh_one, sh_m[0], partial, stats, splits, live, row0, q0, head);
  if (threadIdx.x == 0 && splits > 1) p.arrived[pair] = 0;
}
