// Attention of a few new tokens over both tiers of the cache, straight from the packed pages.
//
// With codes c, scale s and minimum m: q·k = s (q·c) + m Σq, and Σ p v = Σ (p s) c + Σ p m; the inner loops are unpack and
// multiply-add, and the unpacking is shared by the query heads of a KV head. Codes of plane p are used in place, as
// c * 2**(bits * p), the power of two taken out of q or out of the sum (exact). Scores run with lanes over tokens (no
// horizontal sums), values with lanes over channels.
//
// Work is cut into splits of whole pages at fixed positions, merged in order, so a result does not depend on the rest of the
// batch or on the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cache.h"
#include "parallel.h"
#include "vectors.h"

namespace oscar {
namespace {

constexpr int kTile = 256;    // tokens whose scores are held at a time
constexpr int kSplit = 1024;  // tokens of a unit of work
constexpr int kRows = 4;      // query rows that share one pass over the codes
constexpr float kNone = -std::numeric_limits<float>::infinity();

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
      auto run = [&](auto function) {
        function(layer, scratch.bytes.data(), planes, queries.sums + r, queries.rows, scratch.row.data() + t, tokens,
                 scores + r * stride + t, stride);
      };
      switch (std::min(kRows, queries.rows - r)) {
        case 1: run(score_block<1>); break;
        case 2: run(score_block<2>); break;
        case 3: run(score_block<3>); break;
        default: run(score_block<4>);
      }
    }
  }
}

void score_window(const Layer& layer, const Queries& queries, const Piece& piece, float* scores, int64_t stride,
                  Scratch& scratch) {
  typedef Vec<8>::f F;
  const int d = layer.head_dim;
  scratch.row.resize(size_t(d));
  for (int t = piece.from; t < piece.to; ++t) {
    load_row(piece.k_window + t * layer.w_token_stride * type_bytes(layer.window_type), d, layer.window_type,
             scratch.row.data());
    for (int r = 0; r < queries.rows; ++r) {
      const float* q = queries.q + int64_t(r) * d;
      F sum = {};
      for (int c = 0; c < d; c += 8) sum += load<F>(q + c) * load<F>(scratch.row.data() + c);
      float total = 0.0f;
      for (int n = 0; n < 8; ++n) total += sum[n];
      scores[r * stride + t - piece.begin] = total;
    }
  }
}

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
    for (int column = 0; column < row; column += W) {
      const float* w = weights + r * stride;
      float* out = acc + int64_t(r) * d;
      switch (std::min(kRows, rows - r)) {
        case 1: mix_columns<W, 1, P>(packed, row, bits, group, w, group_stride, stride, tokens, column, out, d); break;
        case 2: mix_columns<W, 2, P>(packed, row, bits, group, w, group_stride, stride, tokens, column, out, d); break;
        case 3: mix_columns<W, 3, P>(packed, row, bits, group, w, group_stride, stride, tokens, column, out, d); break;
        default: mix_columns<W, 4, P>(packed, row, bits, group, w, group_stride, stride, tokens, column, out, d);
      }
    }
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

void mix_window(const Layer& layer, int rows, const Piece& piece, const float* p, int64_t stride, float* acc,
                Scratch& scratch) {
  typedef Vec<8>::f F;
  const int d = layer.head_dim;
  scratch.row.resize(size_t(d));
  for (int t = piece.from; t < piece.to; ++t) {
    load_row(piece.v_window + t * layer.w_token_stride * type_bytes(layer.window_type), d, layer.window_type,
             scratch.row.data());
    for (int r = 0; r < rows; ++r) {
      const float weight = p[r * stride + t - piece.begin];
      float* out = acc + int64_t(r) * d;
      for (int c = 0; c < d; c += 8) save(out + c, load<F>(out + c) + weight * load<F>(scratch.row.data() + c));
    }
  }
}

bool reads_window(const Layer& layer, int64_t key, int64_t query) {
  return key < layer.sink || key > query - layer.recent;
}

struct Partial {
  float *acc, *highest, *weight;  // [rows, d], [rows], [rows]
};

class Split {
 public:
  Split(const Layer& layer, const int32_t* pages, const int32_t* windows, int head, const Queries& queries,
        const Partial& out, Scratch& scratch)
      : layer_(layer), pages_(pages), windows_(windows), head_(head), queries_(queries), out_(out), scratch_(scratch) {}

  // Keys from … to, all at or before the last query.
  void run(int64_t from, int64_t to) {
    const int d = layer_.head_dim, size = layer_.page_size, pages = std::max(1, kTile / size);
    std::fill(out_.acc, out_.acc + int64_t(queries_.rows) * d, 0.0f);
    std::fill(out_.highest, out_.highest + queries_.rows, kNone);
    std::fill(out_.weight, out_.weight + queries_.rows, 0.0f);
    for (int64_t page = from / size; page * size < to; page += pages)
      tile(page, std::min(page + pages, (to + size - 1) / size), from, to);
  }

 private:
  Piece piece(int64_t page, int64_t from, int64_t to) const {
    const int64_t size = layer_.page_size, key = page * size;
    Piece p{};
    p.key = key;
    p.from = int(std::max(from - key, int64_t(0)));
    p.to = int(std::min(to - key, size));
    p.begin = p.from / 16 * 16;
    p.end = (p.to + 15) / 16 * 16;
    const int64_t low = key + p.from, high = key + p.to;
    p.window = windows_[page] != 0 && (low < layer_.sink || high - 1 > queries_.first - layer_.recent);
    p.quantized = !layer_.windows_only &&
                  (windows_[page] == 0 ||
                   std::max(low, int64_t(layer_.sink)) < std::min(high, int64_t(queries_.last) + 1 - layer_.recent));
    if (p.quantized) p.page = layer_.pages + pages_[page] * layer_.page_stride + head_ * layer_.head_stride;
    if (p.window) {
      const int64_t bytes = type_bytes(layer_.window_type);
      p.k_window = layer_.windows + (windows_[page] * layer_.w_page_stride + head_ * layer_.w_head_stride) * bytes;
      p.v_window = p.k_window + layer_.w_kv_stride * bytes;
    }
    return p;
  }

  void tile(int64_t first, int64_t last, int64_t from, int64_t to) {
    Scratch& scratch = scratch_;
    std::vector<Piece>& pieces = scratch.pieces;
    const int d = layer_.head_dim, rows = queries_.rows, ratio = layer_.ratio;
    pieces.clear();
    int64_t stride = 0;
    for (int64_t page = first; page < last; ++page) {
      pieces.push_back(piece(page, from, to));
      stride += pieces.back().end - pieces.back().begin;
    }
    scratch.scores.resize(size_t(rows) * stride);
    int64_t column = 0;
    for (const Piece& p : pieces) {
      fetch(p, last);
      score(p, scratch.scores.data() + column, stride);
      column += p.end - p.begin;
    }
    for (int r = 0; r < rows; ++r) {
      float* score = scratch.scores.data() + r * stride;
      float highest = kNone;
#pragma omp simd reduction(max : highest)
      for (int64_t t = 0; t < stride; ++t) highest = score[t] > highest ? score[t] : highest;
      if (highest > out_.highest[r]) {
        const float keep = out_.highest[r] == kNone ? 0.0f : exp_negative(out_.highest[r] - highest);
        out_.highest[r] = highest;
        out_.weight[r] *= keep;
        for (int c = 0; c < d; ++c) out_.acc[int64_t(r) * d + c] *= keep;
      }
      const float base = out_.highest[r] == kNone ? 0.0f : out_.highest[r];
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t t = 0; t < stride; ++t) {
        score[t] = exp_negative(score[t] - base);
        sum += score[t];
      }
      out_.weight[r] += sum;
    }
    column = 0;
    for (const Piece& p : pieces) {
      float* weights = scratch.scores.data() + column;
      column += p.end - p.begin;
      if (!p.quantized) {
        mix_window(layer_, rows, p, weights, stride, out_.acc, scratch);
      } else if (!p.window) {
        mix_quantized(layer_, head_, rows, p, weights, stride, out_.acc, scratch);
      } else {  // some queries read a key here, some there
        const int64_t width = p.end - p.begin;
        scratch.other.assign(size_t(rows) * width, 0.0f);
        for (int r = 0; r < rows; ++r)
          for (int t = p.from; t < p.to; ++t)
            if (reads_window(layer_, p.key + t, queries_.first + r / ratio))
              std::swap(scratch.other[size_t(r * width + t - p.begin)], weights[r * stride + t - p.begin]);
        mix_quantized(layer_, head_, rows, p, weights, stride, out_.acc, scratch);
        mix_window(layer_, rows, p, scratch.other.data(), width, out_.acc, scratch);
      }
    }
  }

  // Ask for what comes next: V of this page, K of the following one. Pages are too short for the hardware to foresee it.
  void fetch(const Piece& p, int64_t last) const {
    const int64_t next = p.key / layer_.page_size + 1;
    const int64_t half = layer_.section[2];
    if (p.page) prefetch(p.page + half, half);
    if (next < last && !layer_.windows_only)
      prefetch(layer_.pages + pages_[next] * layer_.page_stride + head_ * layer_.head_stride, half);
  }

  static void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
  }

  void score(const Piece& p, float* scores, int64_t stride) {
    Scratch& scratch = scratch_;
    const int rows = queries_.rows, width = p.end - p.begin, ratio = layer_.ratio;
    if (p.quantized) score_quantized(layer_, head_, queries_, p, scores, stride, scratch);
    if (p.window && !p.quantized) score_window(layer_, queries_, p, scores, stride, scratch);
    if (p.window && p.quantized) {
      scratch.other.resize(size_t(rows) * width);
      score_window(layer_, queries_, p, scratch.other.data(), width, scratch);
      for (int r = 0; r < rows; ++r)
        for (int t = p.from; t < p.to; ++t)
          if (reads_window(layer_, p.key + t, queries_.first + r / ratio))
            scores[r * stride + t - p.begin] = scratch.other[size_t(r) * width + t - p.begin];
    }
    for (int r = 0; r < rows; ++r) {
      float* score = scores + r * stride;
      if (layer_.softcap > 0.0f) {
        const float cap = layer_.softcap, bias = queries_.bias[r];
#pragma omp simd
        for (int t = 0; t < width; ++t) score[t] = cap * tanh_of((score[t] + bias) / cap);
      }
      // Columns before and behind what this query sees: unread memory, later tokens, tokens left behind by the window.
      const int64_t query = queries_.first + r / ratio, key = p.key + p.begin;
      int64_t low = p.from - p.begin, high = std::min(int64_t(p.to - p.begin), query + 1 - key);
      if (layer_.sliding_window) low = std::max(low, query - layer_.sliding_window + 1 - key);
      low = std::min(low, int64_t(width));
      high = std::max(high, low);
      std::fill(score, score + low, kNone);
      std::fill(score + high, score + width, kNone);
    }
  }

  const Layer& layer_;
  const int32_t *pages_, *windows_;
  int head_;
  const Queries& queries_;
  Partial out_;
  Scratch& scratch_;
};

// One (request, KV head).
struct Job {
  int request, head, rows, new_tokens;
  int64_t from, split;  // first key that any query sees; tokens a split
  int splits;
  size_t buffer;        // where its floats begin: queries, then partial results
};

size_t query_floats(const Layer& layer, int rows) {
  const size_t blocks = size_t(rows + kRows - 1) / kRows * kRows;
  return (size_t(rows) + blocks) * layer.head_dim + size_t(layer.groups + 1) * rows;
}

size_t partial_floats(const Layer& layer, int rows) { return size_t(rows) * (layer.head_dim + 2); }

Queries queries_of(const Layer& layer, const Batch& batch, const Job& job, float* buffer) {
  const int d = layer.head_dim;
  float *q = buffer, *planes = q + int64_t(job.rows) * d;
  float *sums = planes + int64_t((job.rows + kRows - 1) / kRows * kRows) * d, *bias = sums + layer.groups * job.rows;
  const int length = batch.lengths[job.request];
  return {job.rows, length - job.new_tokens, length - 1, q, planes, sums, bias};
}

void prepare(const Layer& layer, const Batch& batch, const Rows& q, const Job& job, float* buffer) {
  const Queries out = queries_of(layer, batch, job, buffer);
  float *rotated = const_cast<float*>(out.q), *planes = const_cast<float*>(out.planes);
  float *sums = const_cast<float*>(out.sums), *bias = const_cast<float*>(out.bias);
  const int d = layer.head_dim, row = d * layer.k_bits / 8, group = d / layer.groups;
  std::vector<float> raw(static_cast<size_t>(d));
  for (int r = 0; r < job.rows; ++r) {
    const int64_t token = batch.query_start[job.request] + r / layer.ratio, head = job.head * layer.ratio + r % layer.ratio;
    float* x = rotated + int64_t(r) * d;
    load_row(q.data + (token * q.token_stride + head * q.head_stride) * type_bytes(q.type), d, q.type, raw.data());
    for (int c = 0; c < d; ++c) raw[size_t(c)] *= layer.scale;
    if (layer.rotate)
      multiply_row(raw.data(), layer.k_rotation + int64_t(job.head) * d * d, d, x);
    else
      std::copy(raw.begin(), raw.end(), x);
    bias[r] = 0.0f;
    for (int c = 0; c < d; ++c) bias[r] += raw[size_t(c)] * layer.k_mean[job.head * d + c];
    for (int g = 0; g < layer.groups; ++g) {
      float sum = 0.0f;
      for (int c = g * group; c < (g + 1) * group; ++c) sum += x[c];
      sums[g * job.rows + r] = sum;
    }
    float* block = planes + int64_t(r / kRows * kRows) * d + r % kRows;
    for (int c = 0; c < d; ++c) block[c * kRows] = x[c] / float(1 << (c / row * layer.k_bits));
  }
}

Partial partial_of(const Layer& layer, const Job& job, int split, float* buffer) {
  float* acc = buffer + query_floats(layer, job.rows) + split * partial_floats(layer, job.rows);
  float* highest = acc + int64_t(job.rows) * layer.head_dim;
  return {acc, highest, highest + job.rows};
}

// Merge the splits in order, rotate back, write the output.
void finish(const Layer& layer, const Batch& batch, const Job& job, float* buffer, const Rows& out) {
  const int d = layer.head_dim;
  std::vector<float> sum(static_cast<size_t>(d)), back(static_cast<size_t>(d));
  for (int r = 0; r < job.rows; ++r) {
    float highest = kNone, weight = 0.0f;
    for (int s = 0; s < job.splits; ++s) highest = std::max(highest, partial_of(layer, job, s, buffer).highest[r]);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int s = 0; s < job.splits; ++s) {
      const Partial part = partial_of(layer, job, s, buffer);
      const float factor = part.highest[r] == kNone ? 0.0f : exp_negative(part.highest[r] - highest);
      weight += part.weight[r] * factor;
      for (int c = 0; c < d; ++c) sum[size_t(c)] += part.acc[int64_t(r) * d + c] * factor;
    }
    for (int c = 0; c < d; ++c) sum[size_t(c)] /= weight;
    if (layer.rotate) {
      multiply_row(sum.data(), layer.v_rotation_t + int64_t(job.head) * d * d, d, back.data());
      for (int c = 0; c < d; ++c) back[size_t(c)] += layer.v_mean[job.head * d + c];
    } else {
      back = sum;
    }
    const int64_t token = batch.query_start[job.request] + r / layer.ratio, head = job.head * layer.ratio + r % layer.ratio;
    store_row(back.data(), d, out.type, out.data + (token * out.token_stride + head * out.head_stride) * type_bytes(out.type));
  }
}

}  // namespace
}  // namespace oscar

// Attend for batch->requests: q and out are [T, heads * ratio, d] in model space.
extern "C" void oscar_decode(const oscar::Layer* shared, const oscar::Batch* batch, const oscar::Rows* q,
                             const oscar::Rows* out, int32_t threads) {
  using namespace oscar;
  Layer own = *shared;
  own.ratio = q->heads / own.heads;
  const Layer* layer = &own;
  static thread_local std::vector<float> buffer_storage;
  static thread_local std::vector<Job> job_storage;
  static thread_local std::vector<std::pair<int, int>> unit_storage;
  auto &jobs = job_storage;  // workers must see the caller's
  auto &units = unit_storage;
  jobs.clear();
  units.clear();
  size_t floats = 0;
  for (int n = 0; n < batch->request_count; ++n) {
    const int request = batch->requests[n], length = batch->lengths[request];
    Job job{};
    job.request = request;
    job.new_tokens = batch->query_start[request + 1] - batch->query_start[request];
    job.rows = job.new_tokens * layer->ratio;
    if (layer->sliding_window) job.from = std::max(0, length - job.new_tokens - layer->sliding_window + 1);
    job.split = int64_t(std::max(1, kSplit / layer->page_size)) * layer->page_size;
    job.splits = int((length - 1) / job.split - job.from / job.split) + 1;
    for (job.head = 0; job.head < layer->heads; ++job.head) {
      job.buffer = floats;
      floats += query_floats(*layer, job.rows) + job.splits * partial_floats(*layer, job.rows);
      for (int s = 0; s < job.splits; ++s) units.emplace_back(int(jobs.size()), s);
      jobs.push_back(job);
    }
  }
  if (buffer_storage.size() < floats) buffer_storage.resize(floats);
  float* buffer = buffer_storage.data();
  const int count = int(jobs.size());
  // Preparing and finishing a head costs rows * d * d; a few of them are not worth waking threads for.
  const int64_t small = int64_t(layer->head_dim) * layer->head_dim * layer->heads * layer->ratio * batch->request_count;
  const int few = small < 400000 ? 1 : threads;
  parallel_for(count, few, [&](int i) { prepare(*layer, *batch, *q, jobs[size_t(i)], buffer + jobs[size_t(i)].buffer); });
  parallel_for(int(units.size()), threads, [&](int i) {
    const Job& job = jobs[size_t(units[size_t(i)].first)];
    const int split = units[size_t(i)].second;
    const int64_t base = (job.from / job.split + split) * job.split;
    const Queries queries = queries_of(*layer, *batch, job, buffer + job.buffer);
    static thread_local Scratch scratch;
    Split(*layer, batch->page_table + job.request * batch->page_row, batch->window_table + job.request * batch->window_row,
          job.head, queries, partial_of(*layer, job, split, buffer + job.buffer), scratch)
        .run(std::max(base, job.from), std::min(base + job.split, int64_t(batch->lengths[job.request])));
  });
  parallel_for(count, few, [&](int i) { finish(*layer, *batch, jobs[size_t(i)], buffer + jobs[size_t(i)].buffer, *out); });
}
