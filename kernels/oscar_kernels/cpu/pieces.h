// What the scoring and mixing loops of decode.cpp work on: queries of a head, runs of tokens, buffers.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "vectors.h"

namespace oscar {
namespace {

constexpr int kRows = 4;  // query rows that share one pass over the codes

// Queries of one KV head of one request: row r is new token r / ratio, query head r % ratio of the group.
struct Queries {
  int rows, first, last;      // rows; position of the first and of the last new token
  const float* q;             // [rows, d] rotated, times scale
  const float* planes;        // [blocks of kRows, d, kRows] the same, divided by the place value of the channel's plane
  const float* sums;          // [groups, rows] sums over the channels of a group
  const float* bias;          // [rows] scale * q·k_mean
};

// A run of tokens of one page. Columns cover tokens begin … end (multiples of 16); tokens from … to are the ones wanted.
struct Piece {
  const uint8_t* page;
  const char *k_window, *v_window;  // token 0 of the page
  int64_t key;                      // position of token 0
  int begin, end, from, to;
  bool quantized, window;           // which tiers some query reads
};

// Buffers of a thread.
struct Scratch {
  std::vector<float> scores, other, weights, meta, row;
  std::vector<uint8_t> bytes;
  std::vector<Piece> pieces;
};

// scale and minimum of tokens begin … end as out[(2 g + i) * tokens + t]
void load_meta(const Layer& layer, const Piece& piece, int kv, float unit, std::vector<float>& buffer, float* out) {
  const int width = layer.groups * 2, tokens = piece.end - piece.begin;
  const char* meta = reinterpret_cast<const char*>(piece.page + layer.section[2 * kv + 1]);
  buffer.resize(size_t(tokens) * width);
  float* values = buffer.data();
  load_row(meta + int64_t(piece.begin) * width * type_bytes(layer.meta_type), tokens * width, layer.meta_type, values);
  if (width == 2) {  // the stride is known to the compiler
    for (int t = 0; t < tokens; ++t) {
      out[t] = values[2 * t] * unit;
      out[tokens + t] = values[2 * t + 1] * unit;
    }
    return;
  }
  for (int n = 0; n < width; ++n)
    for (int t = 0; t < tokens; ++t) out[n * tokens + t] = values[int64_t(t) * width + n] * unit;
}

// Calls function with the number of rows of a block (at most kRows) as a compile-time constant.
template <int N>
using Constant = std::integral_constant<int, N>;

template <class Function>
void with_rows(int rows, const Function& function) {
  switch (std::min(kRows, rows)) {
    case 1: return function(Constant<1>());
    case 2: return function(Constant<2>());
    case 3: return function(Constant<3>());
    default: return function(Constant<4>());
  }
}

// Calls function with the type of the window store and the lanes to use as compile-time constants.
template <class Function>
void with_window_type(const Layer& layer, const Function& function) {
  auto lanes = [&](auto type) {
    if (layer.head_dim % kLanes == 0) return function(type, Constant<kLanes>());
    return function(type, Constant<(kLanes < 8 ? kLanes : 8)>());
  };
  switch (layer.window_type) {
    case kFloat32: return lanes(Constant<kFloat32>());
    case kFloat16: return lanes(Constant<kFloat16>());
    default: return lanes(Constant<kBFloat16>());
  }
}

}  // namespace
}  // namespace oscar
