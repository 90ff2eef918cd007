// Sums of values weighted by probabilities, from the codes or from the window store.
#pragma once

#include "pieces.h"

namespace oscar {
namespace {

// acc[r][c] += sum_t weights[g][r][t] * c_t[c] * 2**(bits p), for R rows and the W * planes channels of W byte columns.
template <int W, int R, int P>
void mix_columns(const uint8_t* packed, int row, int bits, int group, const float* weights, int64_t group_stride,
                 int64_t stride, int tokens, int column, float* acc, int d) {
  typedef typename Vec<W>::f F;
  F sum[R][P] = {};
  const float* of_plane[P];
  for (int p = 0; p < P; ++p) of_plane[p] = weights + (p * row + column) / group * group_stride;
  for (int t = 0; t < tokens; ++t) {
    const auto wide = widen<W>(packed + int64_t(t) * row + column);
    for (int p = 0; p < P; ++p) {
      const F c = masked<W>(wide, ((1 << bits) - 1) << (p * bits));
      for (int r = 0; r < R; ++r) sum[r][p] += of_plane[p][r * stride + t] * c;
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) {
      float* out = acc + int64_t(r) * d + p * row + column;
      save(out, load<F>(out) + sum[r][p] * (1.0f / float(1 << (p * bits))));
    }
}

template <int W, int P>
void mix_rows(const uint8_t* packed, int row, int bits, int group, const float* weights, int64_t group_stride,
              int64_t stride, int rows, int tokens, float* acc, int d) {
  for (int r = 0; r < rows; r += kRows)
    for (int column = 0; column < row; column += W)
      with_rows(rows - r, [&](auto some) {
        mix_columns<W, some.value, P>(packed, row, bits, group, weights + r * stride, group_stride, stride, tokens,
                                      column, acc + int64_t(r) * d, d);
      });
}

template <int W>
void mix_bits(const Layer& layer, const uint8_t* packed, const float* weights, int64_t group_stride, int64_t stride,
              int rows, int tokens, float* acc) {
  const int d = layer.head_dim, bits = layer.v_bits, row = d * bits / 8, group = d / layer.groups;
  if (bits == 2)
    mix_rows<W, 4>(packed, row, bits, group, weights, group_stride, stride, rows, tokens, acc, d);
  else
    mix_rows<W, 2>(packed, row, bits, group, weights, group_stride, stride, rows, tokens, acc, d);
}

// acc[r] += sum over tokens from … to of p[r][t] * v_t
void mix_quantized(const Layer& layer, int head, int rows, const Piece& piece, const float* p, int64_t stride, float* acc,
                   Scratch& scratch) {
  const int d = layer.head_dim, groups = layer.groups, group = d / groups, row = d * layer.v_bits / 8;
  const int columns = piece.end - piece.begin, skip = piece.from - piece.begin, tokens = piece.to - piece.from;
  scratch.row.resize(size_t(2 * groups * columns));
  load_meta(layer, piece, 1, layer.v_unit[head], scratch.meta, scratch.row.data());
  scratch.weights.resize(size_t(groups) * rows * tokens);
  for (int g = 0; g < groups; ++g) {
    const float *scale = scratch.row.data() + 2 * g * columns + skip, *minimum = scale + columns;
    for (int r = 0; r < rows; ++r) {
      const float* from = p + r * stride + skip;
      float* to = scratch.weights.data() + (int64_t(g) * rows + r) * tokens;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int t = 0; t < tokens; ++t) {
        to[t] = from[t] * scale[t];
        sum += from[t] * minimum[t];
      }
      for (int c = 0; c < group; ++c) acc[int64_t(r) * d + g * group + c] += sum;
    }
  }
  const uint8_t* packed = piece.page + layer.section[2] + int64_t(piece.from) * row;
  const int64_t group_stride = int64_t(rows) * tokens;
  auto fits = [&](int w) { return w <= kLanes && row % w == 0 && group % w == 0; };
  if (fits(16)) return mix_bits<16>(layer, packed, scratch.weights.data(), group_stride, tokens, rows, tokens, acc);
  if (fits(8)) return mix_bits<8>(layer, packed, scratch.weights.data(), group_stride, tokens, rows, tokens, acc);
  if (fits(4)) return mix_bits<4>(layer, packed, scratch.weights.data(), group_stride, tokens, rows, tokens, acc);
  mix_bits<2>(layer, packed, scratch.weights.data(), group_stride, tokens, rows, tokens, acc);
}

// acc[r] += sum over tokens from … to of p[r][t] * v_t, for R rows and N vectors of channels.
template <int W, int T, int R, int N>
void mix_channels(const Layer& layer, const Piece& piece, const float* p, int64_t stride, int channel, float* acc) {
  typedef typename Vec<W>::f F;
  F total[R][N] = {};
  for (int t = piece.from; t < piece.to; ++t)
    for (int n = 0; n < N; ++n) {
      const F v = values<W, T>(piece.v_window, t * layer.w_token_stride + channel + n * W);
      for (int r = 0; r < R; ++r) total[r][n] += p[r * stride + t - piece.begin] * v;
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float* out = acc + int64_t(r) * layer.head_dim + channel + n * W;
      save(out, load<F>(out) + total[r][n]);
    }
}

void mix_window(const Layer& layer, int rows, const Piece& piece, const float* p, int64_t stride, float* acc) {
  const int d = layer.head_dim;
  with_window_type(layer, [&](auto type, auto lanes) {
    constexpr int W = lanes.value, T = type.value;
    for (int r = 0; r < rows; r += kRows)
      with_rows(rows - r, [&](auto some) {
        constexpr int R = some.value;
        int c = 0;
        for (; c + 4 * W <= d; c += 4 * W) mix_channels<W, T, R, 4>(layer, piece, p + r * stride, stride, c, acc + int64_t(r) * d);
        for (; c < d; c += W) mix_channels<W, T, R, 1>(layer, piece, p + r * stride, stride, c, acc + int64_t(r) * d);
      });
  });
}

}  // namespace
}  // namespace oscar
