// Attention of chunks of new tokens over both tiers of the cache and over the chunk itself, tile by tile.
//
// A unit of work is a block of queries of one KV head. It walks the keys in tiles, reads one back into float rows, and keeps
// an online softmax; scratch does not grow with the history. Scores lie transposed, [key][query row], so that neither the
// products nor the softmax need sums across lanes. Blocks and tiles begin at fixed positions and a query's result does not
// depend on its neighbours, so the outcome is the same to the last bit however a prompt is cut into chunks.

#include <algorithm>
#include <limits>
#include <vector>

#include "cache.h"
#include "parallel.h"
#include "vectors.h"

namespace oscar {
namespace {

constexpr int kTile = 64;                        // keys, a multiple of kAcross
constexpr int kAcross = kLanes == 8 ? 2 : 4;     // keys, or rows, that share a load in the products
constexpr int kWide = 4;                         // vectors that share a broadcast
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Query positions of a block: enough rows to make good of reading a tile back.
int block_tokens(int ratio) { return ratio <= 3 ? 64 : ratio <= 6 ? 32 : ratio <= 12 ? 16 : 8; }

struct Chunk {
  int request, first, length, raw_start;
  int64_t row;  // of the new tokens' tensors, where position `first` lies
};

struct Tile {
  int64_t key;             // position of its first key
  int count;
  bool quantized, window;  // which tiers some query reads
  bool held[kTile];        // whether the window tier has the key
};

struct Scratch {
  std::vector<float> raw, qt, k[2], v[2], score[2], out, highest, weight, keep, bias;
  std::vector<int32_t> position;
};

// Row of codes → floats.
void read_codes(const uint8_t* packed, const char* meta, const Layer& layer, int bits, float unit, float* out) {
  const int d = layer.head_dim, row = d * bits / 8, group = d / layer.groups;
  const int32_t mask = (1 << bits) - 1;
  for (int g = 0; g < layer.groups; ++g) {
    const float scale = load_scalar(meta, 2 * g, layer.meta_type) * unit;
    const float minimum = load_scalar(meta, 2 * g + 1, layer.meta_type) * unit;
    for (int c = g * group, end = c + group; c < end;) {
      const int plane = c / row, stop = std::min(end, (plane + 1) * row), shift = plane * bits;
      const uint8_t* bytes = packed - plane * row;
      for (; c + kLanes <= stop; c += kLanes) {
        const auto code = (widen<kLanes>(bytes + c) >> shift) & mask;
        save(out + c, __builtin_convertvector(code, typename Vec<kLanes>::f) * scale + minimum);
      }
      for (; c < stop; ++c) out[c] = float((int32_t(bytes[c]) >> shift) & mask) * scale + minimum;
    }
  }
}

// scores[t][row] = k_t · q_row for N vectors of rows; up to kAcross - 1 keys more than `count`, for which there is room. A
// loop of its own for the rest might round otherwise.
template <int N>
void score_columns(const float* k, const float* qt, int d, int rows, int count, float* scores) {
  typedef Vec<kLanes>::f F;
  for (int t = 0; t < count; t += kAcross) {
    F sum[kAcross][N] = {};
    for (int c = 0; c < d; ++c) {
      F q[N];
      for (int n = 0; n < N; ++n) q[n] = load<F>(qt + int64_t(c) * rows + n * kLanes);
      for (int i = 0; i < kAcross; ++i)
        for (int n = 0; n < N; ++n) sum[i][n] += k[(t + i) * d + c] * q[n];
    }
    for (int i = 0; i < kAcross; ++i)
      for (int n = 0; n < N; ++n) save(scores + (t + i) * rows + n * kLanes, sum[i][n]);
  }
}

void score_tile(const float* k, const float* qt, int d, int rows, int count, float* scores) {
  int r = 0;
  for (; r + kWide * kLanes <= rows; r += kWide * kLanes) score_columns<kWide>(k, qt + r, d, rows, count, scores + r);
  for (; r < rows; r += kLanes) score_columns<1>(k, qt + r, d, rows, count, scores + r);
}

// out[row][c] += sum_t p[t][row] * v[t][c] for N vectors of W channels
template <int W, int N>
void mix_columns(const float* v, const float* p, int d, int rows, int count, float* out) {
  typedef typename Vec<W>::f F;
  for (int r = 0; r < rows; r += kAcross) {  // rows is a multiple of kLanes
    F sum[kAcross][N];
    for (int i = 0; i < kAcross; ++i)
      for (int n = 0; n < N; ++n) sum[i][n] = load<F>(out + int64_t(r + i) * d + n * W);
    for (int t = 0; t < count; ++t) {
      F x[N];
      for (int n = 0; n < N; ++n) x[n] = load<F>(v + t * d + n * W);
      for (int i = 0; i < kAcross; ++i)
        for (int n = 0; n < N; ++n) sum[i][n] += p[t * rows + r + i] * x[n];
    }
    for (int i = 0; i < kAcross; ++i)
      for (int n = 0; n < N; ++n) save(out + int64_t(r + i) * d + n * W, sum[i][n]);
  }
}

template <int W>
void mix_tile(const float* v, const float* p, int d, int rows, int count, float* out) {
  int c = 0;
  for (; c + kWide * W <= d; c += kWide * W) mix_columns<W, kWide>(v + c, p, d, rows, count, out + c);
  for (; c < d; c += W) mix_columns<W, 1>(v + c, p, d, rows, count, out + c);
}

class Block {
 public:
  Block(const Layer& layer, const Batch& batch, const Rows& own_k, const Rows& own_v, const Chunk& chunk, int head,
        int begin, int end, Scratch& scratch)
      : layer_(layer), own_{&own_k, &own_v}, chunk_(chunk), head_(head), begin_(begin), end_(end), s_(scratch),
        pages_(batch.page_table + chunk.request * batch.page_row),
        windows_(batch.window_table + chunk.request * batch.window_row),
        used_((end - begin) * layer.ratio), rows_((used_ + kLanes - 1) / kLanes * kLanes) {}

  void run(const Rows& q, const Rows& out) {
    const int d = layer_.head_dim;
    prepare(q);
    int64_t key = layer_.sliding_window ? std::max(0, begin_ - layer_.sliding_window + 1) : 0;
    while (key < end_) {
      const int64_t stop = std::min<int64_t>((key / kTile + 1) * kTile, end_);
      step(key, int(stop - key));
      key = stop;
    }
    std::vector<float> back(static_cast<size_t>(d));
    for (int r = 0; r < used_; ++r) {
      float* x = s_.out.data() + int64_t(r) * d;
      for (int c = 0; c < d; ++c) x[c] /= s_.weight[size_t(r)];
      if (layer_.rotate) {
        multiply_row(x, layer_.v_rotation_t + int64_t(head_) * d * d, d, back.data());
        for (int c = 0; c < d; ++c) back[size_t(c)] += layer_.v_mean[head_ * d + c];
      } else {
        std::copy(x, x + d, back.begin());
      }
      store_row(back.data(), d, out.type, address(out, r));
    }
  }

 private:
  char* address(const Rows& rows, int r) const {
    const int64_t token = chunk_.row + begin_ - chunk_.first + r / layer_.ratio;
    const int64_t head = int64_t(head_) * layer_.ratio + r % layer_.ratio;
    return rows.data + (token * rows.token_stride + head * rows.head_stride) * type_bytes(rows.type);
  }

  void prepare(const Rows& q) {
    const int d = layer_.head_dim;
    const size_t rows = size_t(rows_);
    s_.qt.assign(rows * d, 0.0f);
    s_.out.assign(rows * d, 0.0f);
    s_.highest.assign(rows, kNone);
    s_.weight.assign(rows, 0.0f);
    s_.keep.resize(rows);
    s_.bias.assign(rows, 0.0f);
    s_.position.assign(rows, end_ - 1);
    s_.raw.resize(size_t(2 * d));
    float *raw = s_.raw.data(), *rotated = raw + d;
    for (int r = 0; r < used_; ++r) {
      s_.position[size_t(r)] = begin_ + r / layer_.ratio;
      load_row(address(q, r), d, q.type, raw);
      for (int c = 0; c < d; ++c) raw[c] *= layer_.scale;
      for (int c = 0; c < d; ++c) s_.bias[size_t(r)] += raw[c] * layer_.k_mean[head_ * d + c];
      if (layer_.rotate)
        multiply_row(raw, layer_.q_rotation + int64_t(head_) * d * d, d, rotated);
      else
        std::copy(raw, raw + d, rotated);
      for (int c = 0; c < d; ++c) s_.qt[size_t(c) * rows + r] = rotated[c];
    }
  }

  bool raw(int64_t key) const { return key >= chunk_.raw_start; }

  Tile look_at(int64_t key, int count) const {
    Tile tile{};
    tile.key = key;
    tile.count = count;
    for (int t = 0; t < count; ++t) {
      const int64_t k = key + t;
      tile.held[t] = k >= chunk_.first || windows_[k / layer_.page_size] != 0;
      const bool always = raw(k) || k < layer_.sink || k > int64_t(end_) - 1 - layer_.recent;
      const bool ever = always || k > int64_t(begin_) - layer_.recent;
      tile.window |= tile.held[t] && ever;
      tile.quantized |= !layer_.windows_only && !(tile.held[t] && always);
    }
    return tile;
  }

  // Floats [count, d] of K (kv 0) or V of one tier; zeros where the window tier does not have the key.
  void read(const Tile& tile, int kv, bool window, float* out) const {
    const int d = layer_.head_dim, size = layer_.page_size, bits = kv ? layer_.v_bits : layer_.k_bits;
    const float unit = (kv ? layer_.v_unit : layer_.k_unit)[head_];
    const int meta_bytes = 2 * layer_.groups * type_bytes(layer_.meta_type);
    for (int t = 0; t < tile.count; ++t, out += d) {
      const int64_t key = tile.key + t, page = key / size, slot = key % size;
      if (!window) {
        const uint8_t* head = layer_.pages + pages_[page] * layer_.page_stride + head_ * layer_.head_stride;
        const char* meta = reinterpret_cast<const char*>(head + layer_.section[2 * kv + 1]) + slot * meta_bytes;
        read_codes(head + layer_.section[2 * kv] + slot * (d * bits / 8), meta, layer_, bits, unit, out);
      } else if (key >= chunk_.first) {
        const Rows& own = *own_[kv];
        const int64_t token = chunk_.row + key - chunk_.first;
        load_row(own.data + (token * own.token_stride + head_ * own.head_stride) * 4, d, kFloat32, out);
        if (!raw(key)) {  // what the window store holds, or would
          char rounded[4 * 8];
          for (int c = 0; c < d; c += 8) {
            store_row(out + c, 8, layer_.window_type, rounded);
            load_row(rounded, 8, layer_.window_type, out + c);
          }
        }
      } else if (tile.held[t]) {
        const int64_t offset = windows_[page] * layer_.w_page_stride + kv * layer_.w_kv_stride +
                               head_ * layer_.w_head_stride + slot * layer_.w_token_stride;
        load_row(layer_.windows + offset * type_bytes(layer_.window_type), d, layer_.window_type, out);
      } else {
        std::fill(out, out + d, 0.0f);
      }
    }
  }

  void step(int64_t key, int count) {
    const int d = layer_.head_dim, rows = rows_;
    const Tile tile = look_at(key, count);
    for (int tier = 0; tier < 2; ++tier) {
      if (!(tier ? tile.window : tile.quantized)) continue;
      s_.k[tier].resize(size_t(kTile) * d);
      s_.v[tier].resize(size_t(kTile) * d);
      s_.score[tier].resize(size_t(kTile) * rows);
      read(tile, 0, tier == 1, s_.k[tier].data());
      read(tile, 1, tier == 1, s_.v[tier].data());
      score_tile(s_.k[tier].data(), s_.qt.data(), d, rows, count, s_.score[tier].data());
    }
    const bool both = tile.window && tile.quantized;
    float* score = s_.score[tile.window ? 1 : 0].data();
    const float* other = s_.score[0].data();
    const int32_t* position = s_.position.data();
    if (both)
      for (int t = 0; t < count; ++t)
        for (int r = 0; r < rows; ++r)
          score[t * rows + r] = reads_window(tile, t, position[r]) ? score[t * rows + r] : other[t * rows + r];
    if (layer_.softcap > 0.0f) {
      const float cap = layer_.softcap, *bias = s_.bias.data();
      for (int t = 0; t < count; ++t)
        for (int r = 0; r < rows; ++r) score[t * rows + r] = cap * tanh_of((score[t * rows + r] + bias[r]) / cap);
    }
    if (key + count - 1 > begin_ || layer_.sliding_window) hide(tile, score);
    softmax(score, count);
    if (both) {
      float* quantized = s_.score[0].data();
      for (int t = 0; t < count; ++t)
        for (int r = 0; r < rows; ++r) {
          const bool window = reads_window(tile, t, position[r]);
          const float p = score[t * rows + r];
          quantized[t * rows + r] = window ? 0.0f : p;
          score[t * rows + r] = window ? p : 0.0f;
        }
    }
    for (int tier = 0; tier < 2; ++tier) {
      if (!(tier ? tile.window : tile.quantized)) continue;
      const float *v = s_.v[tier].data(), *p = s_.score[tier].data();
      if (d % kLanes == 0)
        mix_tile<kLanes>(v, p, d, rows, count, s_.out.data());
      else
        mix_tile<(kLanes < 8 ? kLanes : 8)>(v, p, d, rows, count, s_.out.data());
    }
  }

  bool reads_window(const Tile& tile, int t, int64_t query) const {
    const int64_t key = tile.key + t;
    return tile.held[t] && (raw(key) || key < layer_.sink || key > query - layer_.recent);
  }

  void hide(const Tile& tile, float* score) const {
    const int32_t* position = s_.position.data();
    for (int t = 0; t < tile.count; ++t) {
      const int32_t key = int32_t(tile.key + t), window = layer_.sliding_window;
      for (int r = 0; r < rows_; ++r) {
        const bool seen = key <= position[r] && (window == 0 || key > position[r] - window);
        score[t * rows_ + r] = seen ? score[t * rows_ + r] : kNone;
      }
    }
  }

  // Scores become weights relative to the new maxima; sums and outputs so far are brought to the same measure.
  void softmax(float* score, int count) {
    const int d = layer_.head_dim, rows = rows_;
    float *highest = s_.highest.data(), *weight = s_.weight.data(), *keep = s_.keep.data();
    std::copy(highest, highest + rows, keep);
    for (int t = 0; t < count; ++t)
      for (int r = 0; r < rows; ++r) highest[r] = score[t * rows + r] > highest[r] ? score[t * rows + r] : highest[r];
    bool changed = false;
    for (int r = 0; r < rows; ++r) {
      changed |= keep[r] != highest[r];
      keep[r] = keep[r] == highest[r] ? 1.0f : exp_negative(keep[r] - highest[r]);
    }
    for (int r = 0; r < rows; ++r) weight[r] *= keep[r];
    for (int t = 0; t < count; ++t)
      for (int r = 0; r < rows; ++r) {
        const float base = highest[r] == kNone ? 0.0f : highest[r];  // a query that has seen no key yet
        const float p = exp_negative(score[t * rows + r] - base);
        score[t * rows + r] = p;
        weight[r] += p;
      }
    if (!changed) return;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < d; ++c) s_.out[size_t(r) * d + c] *= keep[r];
  }

  const Layer& layer_;
  const Rows* own_[2];
  const Chunk& chunk_;
  int head_, begin_, end_;
  Scratch& s_;
  const int32_t *pages_, *windows_;
  int used_, rows_;
};

}  // namespace
}  // namespace oscar

// Attend for batch->requests: q and out [T, heads * ratio, d] in model space, own_k and own_v float32 [T, heads, d] the
// new tokens as oscar_rotate gives them.
extern "C" void oscar_prefill(const oscar::Layer* shared, const oscar::Batch* batch, const oscar::Rows* q,
                              const oscar::Rows* own_k, const oscar::Rows* own_v, const oscar::Rows* out,
                              int32_t threads) {
  using namespace oscar;
  Layer layer = *shared;
  layer.ratio = q->heads / layer.heads;
  struct Unit {
    int chunk, head, begin, end;
  };
  std::vector<Chunk> chunks;
  std::vector<Unit> units;
  const int size = block_tokens(layer.ratio);
  for (int n = 0; n < batch->request_count; ++n) {
    const int request = batch->requests[n], length = batch->lengths[request], row = batch->query_start[request];
    const int first = length - (batch->query_start[request + 1] - row);
    chunks.push_back({request, first, length, batch->chunk_start[request], row});
    for (int head = 0; head < layer.heads; ++head)
      for (int begin = first; begin < length;) {
        const int end = std::min(length, (begin / size + 1) * size);
        units.push_back({n, head, begin, end});
        begin = end;
      }
  }
  // The blocks with the longest histories first, so that no thread is left with one at the end.
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.end > b.end; });
  parallel_for(int(units.size()), threads, [&](int i) {
    static thread_local Scratch scratch;
    const Unit& unit = units[size_t(i)];
    Block(layer, *batch, *own_k, *own_v, chunks[size_t(unit.chunk)], unit.head, unit.begin, unit.end, scratch)
        .run(*q, *out);
  });
}
