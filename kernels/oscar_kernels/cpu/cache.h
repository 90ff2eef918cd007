// What the caller passes in (mirrored field by field in cache.py), and number formats.
#pragma once

#include <cstdint>
#include <cstring>

namespace oscar {

enum Type : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3 };

// One attention layer. Strides of pages are in bytes, those of windows in elements.
struct Layer {
  uint8_t* pages;            // [pages, heads, head_bytes], the last dimension contiguous
  int64_t page_stride, head_stride;
  char* windows;             // [window pages, 2, heads, page_size, d], the last dimension contiguous
  int64_t w_page_stride, w_kv_stride, w_head_stride, w_token_stride;
  const float *k_rotation, *q_rotation, *v_rotation, *v_rotation_t;  // [heads, d, d]
  const float *k_mean, *v_mean;                                      // [heads, d]
  const float *k_shrink, *v_shrink, *k_unit, *v_unit;                // [heads]
  int64_t section[4];        // byte offsets of k_codes, k_meta, v_codes, v_meta
  int32_t heads, head_dim, page_size, k_bits, v_bits, groups;
  int32_t meta_type, window_type;
  int32_t rotate;            // 0: rotations are the identity and means are zero
  int32_t windows_only;      // 1: there is no INT2 tier
  int32_t sink, recent;
  int32_t sliding_window;    // 0: none
  float scale, softcap;      // softcap 0: none
  int32_t ratio;             // query heads of a KV head; set by decode from its q
};

// A ragged batch; see BatchTables in oscar_serving/attention/base.py.
struct Batch {
  const int32_t *query_start, *lengths, *chunk_start;
  const int32_t *page_table, *window_table;  // [requests, row_stride]
  int64_t page_row, window_row;
  const int32_t* requests;                   // which requests to attend for
  int32_t request_count;                     // of those
  int32_t total;                             // requests in the tables
};

// A tensor [tokens, heads, d] of the model; strides in elements, the last dimension contiguous.
struct Rows {
  char* data;
  int64_t token_stride, head_stride;
  int32_t heads, type;
};

inline int type_bytes(int32_t type) { return type == kFloat32 ? 4 : type == kFloat8 ? 1 : 2; }

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float from_bfloat16(uint16_t h) { return float_of(uint32_t(h) << 16); }

inline uint16_t to_bfloat16(float x) {  // round to nearest even, as torch does
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

#ifdef __FLT16_MANT_DIG__
inline float from_float16(uint16_t h) {
  _Float16 x;
  std::memcpy(&x, &h, 2);
  return float(x);
}

inline uint16_t to_float16(float f) {
  _Float16 x = _Float16(f);
  uint16_t h;
  std::memcpy(&h, &x, 2);
  return h;
}
#else
inline float from_float16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = uint32_t(h & 0x7FFFu) << 13;
  if ((h & 0x7C00u) == 0x7C00u) return float_of(sign | 0x7F800000u | rest);
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}

inline uint16_t to_float16(float f) {
  uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return uint16_t(sign | 0x7E00u);
  if (a >= 0x477FF000u) return uint16_t(sign | 0x7C00u);                    // rounds to infinity
  if (a < 0x38800000u) return uint16_t(sign | (bits_of(float_of(a) + 0.5f) - 0x3F000000u));  // subnormal
  return uint16_t(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
}
#endif

// Float8 e4m3fn of a value within ±448, round to nearest even.
inline uint8_t to_float8(float f) {
  uint32_t u = bits_of(f), sign = (u >> 24) & 0x80u, a = u & 0x7FFFFFFFu;
  if (a < 0x3C800000u) return uint8_t(sign | (bits_of(float_of(a) + 16384.0f) - 0x46800000u));  // subnormal
  return uint8_t(sign | ((a - 0x3C000000u + 0x7FFFFu + ((a >> 20) & 1u)) >> 20));
}

// Value of a float8 e4m3fn that is a number.
inline float from_float8(uint8_t b) {
  const uint32_t magnitude = b & 0x7Fu;
  const float subnormal = float(int32_t(magnitude)) * 0x1p-9f, normal = float_of((magnitude << 20) + 0x3C000000u);
  return float_of(bits_of(magnitude < 8u ? subnormal : normal) | (uint32_t(b & 0x80u) << 24));
}

inline float load_scalar(const char* data, int64_t i, int32_t type) {
  uint16_t h;
  float f;
  switch (type) {
    case kFloat32:
      std::memcpy(&f, data + 4 * i, 4);
      return f;
    case kFloat8:
      return from_float8(uint8_t(data[i]));
    default:
      std::memcpy(&h, data + 2 * i, 2);
      return type == kFloat16 ? from_float16(h) : from_bfloat16(h);
  }
}

inline void load_row(const char* data, int n, int32_t type, float* out) {
  switch (type) {
    case kFloat32:
      std::memcpy(out, data, size_t(n) * 4);
      break;
    case kFloat16:
      for (int i = 0; i < n; ++i) out[i] = load_scalar(data, i, kFloat16);
      break;
    case kBFloat16:
      for (int i = 0; i < n; ++i) out[i] = load_scalar(data, i, kBFloat16);
      break;
    default:
      for (int i = 0; i < n; ++i) out[i] = load_scalar(data, i, kFloat8);
  }
}

inline void store_row(const float* x, int n, int32_t type, char* out) {
  if (type == kFloat32) {
    std::memcpy(out, x, size_t(n) * 4);
    return;
  }
  for (int i = 0; i < n; ++i) {
    uint16_t h = type == kFloat16 ? to_float16(x[i]) : to_bfloat16(x[i]);
    std::memcpy(out + 2 * i, &h, 2);
  }
}

}  // namespace oscar
