// q·k of the rows of a head with the tokens of a piece, from the codes or from the window store.
#pragma once

#include "pieces.h"

namespace oscar {
namespace {

// Scores of R rows for 16 tokens: score[r][t] += s (q·c) + m Σq. Bytes lie transposed, [row bytes][16 tokens].
template <int R>
void score_block(const Layer& layer, const uint8_t* bytes, const float* planes, const float* sums, int sum_stride,
                 const float* meta, int meta_stride, float* scores, int64_t stride) {
  typedef typename Vec<kLanes>::f F;
  constexpr int kParts = 16 / kLanes;
  const int bits = layer.k_bits, row = layer.head_dim * bits / 8, group = layer.head_dim / layer.groups;
  for (int part = 0; part < kParts; ++part) {
    const uint8_t* lanes = bytes + part * kLanes;
    F total[R] = {};
    for (int g = 0; g < layer.groups; ++g) {
      F even[R] = {}, odd[R] = {};
      for (int c = g * group, end = c + group; c < end;) {
        const int plane = c / row, stop = std::min(end, (plane + 1) * row);
        const int32_t mask = ((1 << bits) - 1) << (plane * bits);
        for (; c + 2 <= stop; c += 2) {
          const uint8_t* p = lanes + (c - plane * row) * 16;
          const F a = masked<kLanes>(widen<kLanes>(p), mask), b = masked<kLanes>(widen<kLanes>(p + 16), mask);
          const float* q = planes + c * kRows;
          for (int r = 0; r < R; ++r) {
            even[r] += q[r] * a;
            odd[r] += q[kRows + r] * b;
          }
        }
        if (c < stop) {
          const F a = masked<kLanes>(widen<kLanes>(lanes + (c - plane * row) * 16), mask);
          for (int r = 0; r < R; ++r) even[r] += planes[c * kRows + r] * a;
          ++c;
        }
      }
      const F scale = load<F>(meta + 2 * g * meta_stride + part * kLanes);
      const F minimum = load<F>(meta + (2 * g + 1) * meta_stride + part * kLanes);
      for (int r = 0; r < R; ++r) total[r] += scale * (even[r] + odd[r]) + minimum * sums[g * sum_stride + r];
    }
    for (int r = 0; r < R; ++r) save(scores + r * stride + part * kLanes, total[r]);
  }
}

void score_quantized(const Layer& layer, int head, const Queries& queries, const Piece& piece, float* scores,
                     int64_t stride, Scratch& scratch) {
  const int row = layer.head_dim * layer.k_bits / 8, tokens = piece.end - piece.begin;
  scratch.row.resize(size_t(2 * layer.groups * tokens));
  load_meta(layer, piece, 0, layer.k_unit[head], scratch.meta, scratch.row.data());
  scratch.bytes.resize(size_t((row + 15) / 16 * 256));
  const uint8_t* packed = piece.page + layer.section[0] + int64_t(piece.begin) * row;
  for (int t = 0; t < tokens; t += 16) {
    // The last 16 bytes of a row may reach into what follows it; the section is followed by its scales, so never past the page.
    for (int j = 0; j < row; j += 16) transpose(packed + int64_t(t) * row + j, row, scratch.bytes.data() + 16 * j);
    for (int r = 0; r < queries.rows; r += kRows) {
      const float* planes = queries.planes + int64_t(r) * layer.head_dim;
      with_rows(queries.rows - r, [&](auto rows) {
        score_block<rows.value>(layer, scratch.bytes.data(), planes, queries.sums + r, queries.rows,
                                scratch.row.data() + t, tokens, scores + r * stride + t, stride);
      });
    }
  }
}

// Scores of R rows for the tokens of a window piece; lanes over channels.
template <int W, int T, int R>
void score_rows(const Layer& layer, const float* q, const Piece& piece, float* scores, int64_t stride) {
  typedef typename Vec<W>::f F;
  const int d = layer.head_dim;
  for (int t = piece.from; t < piece.to; ++t) {
    F total[R] = {};
    for (int c = 0; c < d; c += W) {
      const F k = values<W, T>(piece.k_window, t * layer.w_token_stride + c);
      for (int r = 0; r < R; ++r) total[r] += load<F>(q + int64_t(r) * d + c) * k;
    }
    for (int r = 0; r < R; ++r) scores[r * stride + t - piece.begin] = sum<W>(total[r]);
  }
}

void score_window(const Layer& layer, const Queries& queries, const Piece& piece, float* scores, int64_t stride) {
  with_window_type(layer, [&](auto type, auto lanes) {
    for (int r = 0; r < queries.rows; r += kRows)
      with_rows(queries.rows - r, [&](auto rows) {
        score_rows<lanes.value, type.value, rows.value>(layer, queries.q + int64_t(r) * layer.head_dim, piece,
                                                        scores + r * stride, stride);
      });
  });
}

}  // namespace
}  // namespace oscar
