// Decode attention over a mixed-precision paged cache: INT2/INT4 history and 16-bit windows in one launch.
//
// Compiled by NVRTC or nvcc with -D of the macros of params.cuh; no header but these is included. One CTA serves (split, KV head,
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

#include "merge.cuh"
#include "packed.cuh"
#include "window.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) oscar_decode(const __grid_constant__ Params p) {
  const int split = blockIdx.x, head = blockIdx.y % p.heads, row_tile = blockIdx.y / p.heads, request = blockIdx.z;
  // Matrices are never written while kernels run: they come in while the kernel in front still works.
  const u16* k_turn = p.k_turn + (i64)head * D * D;
  Turn turn;
  if (p.k_turn) load_turn(turn, k_turn);
  if (p.k_turn && !TURN_AHEAD) prefetch_matrix(p.k_turn, head);
  if (p.v_back && split == 0) prefetch_matrix(p.v_back, head);
  wait_for_previous();
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
    rotate_rows<false>(sh_q, turn, k_turn, top);
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

  let_next_start();  // not earlier: its CTAs would wait where CTAs of this grid still have to run
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
  finish(p, sh_q, (float(*)[ROWS]) & sh_o[0][0][0], sh_one, sh_m[0], sh_top, partial, stats, splits, live, row0, q0, head);
  if (threadIdx.x == 0 && splits > 1) p.arrived[pair] = 0;
}
