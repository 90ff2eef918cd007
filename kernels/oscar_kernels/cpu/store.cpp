// Rotate, quantize, pack and scatter new tokens. Compiled without contraction: the bytes are those of the torch codec
// (oscar_serving/codec/affine.py, which defines them) for the same rotated rows.

#include <algorithm>
#include <vector>

#include "cache.h"
#include "parallel.h"
#include "vectors.h"

namespace oscar {
namespace {

constexpr float kFloat16Max = 65504.0f;
constexpr float kFloat8Max = 448.0f;

// One group of one row: codes 0 … top of x[0 … n) and the stored scale and minimum.
void quantize_group(const float* x, int n, float top, float shrink, float unit, int32_t meta_type, uint8_t* codes,
                    char* meta) {
  float lo = x[0], hi = x[0];
  for (int i = 1; i < n; ++i) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  lo *= shrink;
  hi *= shrink;
  float stored[2] = {(hi - lo) * float(1.0 / double(top)), lo};
  for (int i = 0; i < 2; ++i) {
    if (meta_type == kFloat16) {
      uint16_t h = to_float16(stored[i]);
      std::memcpy(meta + 2 * i, &h, 2);
    } else {
      meta[i] = char(to_float8(std::min(std::max(stored[i] / unit, -kFloat8Max), kFloat8Max)));
    }
    stored[i] = load_scalar(meta, i, meta_type) * unit;
  }
  const float reciprocal = stored[0] > 0.0f ? 1.0f / stored[0] : 0.0f, minimum = stored[1];
  for (int i = 0; i < n; ++i) {
    float y = (x[i] - minimum) * reciprocal + 0.5f;
    y = y > 0.0f ? y : 0.0f;
    codes[i] = uint8_t(int32_t(y < top ? y : top));  // within 0 … top, truncation is floor
  }
}

void pack(const uint8_t* codes, int d, int bits, uint8_t* out) {
  const int planes = 8 / bits, row = d / planes;
  for (int j = 0; j < row; ++j) out[j] = codes[j];
  for (int p = 1; p < planes; ++p)
    for (int j = 0; j < row; ++j) out[j] = uint8_t(out[j] | (codes[p * row + j] << (p * bits)));
}

void rotate_row(const Layer& layer, const Rows& rows, int kv, int token, int head, float* raw, float* out) {
  const int d = layer.head_dim;
  const char* data = rows.data + (token * rows.token_stride + head * rows.head_stride) * type_bytes(rows.type);
  if (!layer.rotate) {
    load_row(data, d, rows.type, out);
    return;
  }
  load_row(data, d, rows.type, raw);
  const float* mean = (kv ? layer.v_mean : layer.k_mean) + head * d;
  for (int i = 0; i < d; ++i) raw[i] -= mean[i];
  multiply_row(raw, (kv ? layer.v_rotation : layer.k_rotation) + int64_t(head) * d * d, d, out);
}

void store_token(const Layer& layer, const Batch& batch, const Rows& k, const Rows& v, int request, int token) {
  const int d = layer.head_dim, size = layer.page_size, group = d / layer.groups;
  const int position = batch.lengths[request] - batch.query_start[request + 1] + token;
  const int slot = position % size;
  const int64_t page = layer.windows_only ? 0 : batch.page_table[request * batch.page_row + position / size];
  const int64_t window = batch.window_table[request * batch.window_row + position / size];
  const int meta_bytes = 2 * type_bytes(layer.meta_type);
  static thread_local std::vector<float> scratch;
  static thread_local std::vector<uint8_t> codes;
  scratch.resize(size_t(2 * d));
  codes.resize(size_t(d));
  float *raw = scratch.data(), *x = raw + d;
  for (int kv = 0; kv < 2; ++kv) {
    const Rows& rows = kv ? v : k;
    const int bits = kv ? layer.v_bits : layer.k_bits;
    for (int h = 0; h < layer.heads; ++h) {
      rotate_row(layer, rows, kv, token, h, raw, x);
      if (window) {
        int64_t offset = window * layer.w_page_stride + kv * layer.w_kv_stride + h * layer.w_head_stride;
        offset += slot * layer.w_token_stride;
        store_row(x, d, layer.window_type, layer.windows + offset * type_bytes(layer.window_type));
      }
      if (!page) continue;
      for (int i = 0; i < d; ++i) {
        float y = x[i] == x[i] ? x[i] : 0.0f;
        x[i] = y < -kFloat16Max ? -kFloat16Max : y > kFloat16Max ? kFloat16Max : y;
      }
      uint8_t* head = layer.pages + page * layer.page_stride + h * layer.head_stride;
      char* meta = reinterpret_cast<char*>(head + layer.section[2 * kv + 1]) + slot * layer.groups * meta_bytes;
      const float shrink = (kv ? layer.v_shrink : layer.k_shrink)[h], unit = (kv ? layer.v_unit : layer.k_unit)[h];
      for (int g = 0; g < layer.groups; ++g)
        quantize_group(x + g * group, group, float((1 << bits) - 1), shrink, unit, layer.meta_type,
                       codes.data() + g * group, meta + g * meta_bytes);
      pack(codes.data(), d, bits, head + layer.section[2 * kv] + int64_t(slot) * (d * bits / 8));
    }
  }
}

}  // namespace
}  // namespace oscar

extern "C" {

// Write all new tokens of the batch to both stores.
void oscar_store(const oscar::Layer* layer, const oscar::Batch* batch, const oscar::Rows* k, const oscar::Rows* v,
                 int32_t threads) {
  constexpr int kBlock = 16;  // tokens a thread takes at a time
  const int tokens = batch->query_start[batch->total];
  oscar::parallel_for((tokens + kBlock - 1) / kBlock, threads, [&](int block) {
    const int first = block * kBlock, last = std::min(tokens, first + kBlock);
    int request = int(std::upper_bound(batch->query_start, batch->query_start + batch->total + 1, first) -
                      batch->query_start) - 1;
    for (int token = first; token < last; ++token) {
      while (batch->query_start[request + 1] <= token) ++request;
      oscar::store_token(*layer, *batch, *k, *v, request, token);
    }
  });
}

// Rotated K (kv 0) or V (kv 1) as oscar_store computes it: float32 [tokens, heads, d].
void oscar_rotate(const oscar::Layer* layer, const oscar::Rows* rows, int32_t tokens, int32_t kv, float* out,
                  int32_t threads) {
  const int d = layer->head_dim;
  oscar::parallel_for(tokens, threads, [&](int token) {
    static thread_local std::vector<float> raw;
    raw.resize(size_t(d));
    for (int h = 0; h < layer->heads; ++h)
      oscar::rotate_row(*layer, *rows, kv, token, h, raw.data(), out + (int64_t(token) * layer->heads + h) * d);
  });
}

int64_t oscar_layer_bytes() { return int64_t(sizeof(oscar::Layer)); }
}
