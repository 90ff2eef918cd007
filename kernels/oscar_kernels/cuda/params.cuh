// What decode.cu is compiled for (one macro each), its parameters, and what follows from them.

#pragma once

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
  const u16* v_back;         // [Hkv, D, D] fp16: R_V (row: model channel), or null
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
