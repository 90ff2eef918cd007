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
#include "mixes.h"
#include "parallel.h"
#include "scores.h"

namespace oscar {
namespace {

constexpr int kTile = 256;    // tokens whose scores are held at a time
constexpr int kSplit = 1024;  // tokens of a unit of work
constexpr float kNone = -std::numeric_limits<float>::infinity();

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
        mix_window(layer_, rows, p, weights, stride, out_.acc);
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
        mix_window(layer_, rows, p, scratch.other.data(), width, out_.acc);
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
    if (p.window && !p.quantized) score_window(layer_, queries_, p, scores, stride);
    if (p.window && p.quantized) {
      scratch.other.resize(size_t(rows) * width);
      score_window(layer_, queries_, p, scratch.other.data(), width);
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
      multiply_row(raw.data(), layer.q_rotation + int64_t(job.head) * d * d, d, x);
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
