// The SRFT codec on a CPU: new rows to signed codes, and attention of a few new tokens straight from the codes.
//
// Rows lie in pages, [pages, heads, page_size, row] for codes and for scales; a cache of one buffer a sequence is the
// case of one page each. Scores and values have lanes over channels. A unit is 16 channels: at 4 bits eight bytes, whose
// low nibbles are the even channels and whose high ones the odd; queries are brought into that order once, outputs back.
//
// Work is cut into splits at fixed positions that are merged in order, and every row of a matrix product is summed in the
// same order whatever is computed beside it, so a result does not depend on the rest of the batch or on threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace oscar {
namespace {

constexpr int kUnit = 16;      // channels unpacked together
constexpr int kBlock = 4;      // rows that share what is unpacked or loaded
constexpr int kRun = 64;       // keys whose scores are held at a time
constexpr int kSplit = 1024;   // keys of a unit of work
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kFloat16Max = 65504.0f;
typedef Vec<8>::f F;
typedef Vec<8>::i I;

}  // namespace

// Packed rows of one layer.
struct Packed {
  uint8_t* codes[2];  // K, V
  uint16_t* scales[2];
  int64_t page_size;
  int32_t heads, head_dim, bits[2], groups;
};

// What a call of oscar_srft_attend is about. Requests are rows of table, lengths and query_start.
struct Attend {
  const float* q;             // [T, heads * ratio, d], model space
  float* out;                 // the same
  const float *k_read, *v_read_t;  // [heads, d, d]: R diag(lambda) of K; of V, transposed
  const int32_t* table;       // [requests, table_stride] pages
  const int64_t *lengths, *query_start, *chosen;  // keys of a request; its first row of q; the requests to serve
  const uint8_t* mask;        // [requests, new tokens, keys], or null
  int64_t table_stride, first, mask_request, mask_token;  // first: row of key 0
  int32_t count, ratio, window, threads;
  float scale, softcap;
};

namespace {

// Channels of a unit in the order that unpacking gives.
inline int channel(int bits, int i) { return bits == 8 ? i : i < 8 ? 2 * i : 2 * (i - 8) + 1; }

template <int Bits>
inline void unpack(const uint8_t* p, F& a, F& b) {
  if constexpr (Bits == 8) {
    a = __builtin_convertvector((widen<8>(p) << 24) >> 24, F);
    b = __builtin_convertvector((widen<8>(p + 8) << 24) >> 24, F);
  } else {
    const I x = widen<8>(p);
    a = __builtin_convertvector((x << 28) >> 28, F);
    b = __builtin_convertvector((x << 24) >> 28, F);
  }
}

// out[r][e] = sum_i x[r][i] * matrix[i][e] for N rows, each summed in the order of i.
template <int N>
void multiply_block(const float* const* x, const float* matrix, int d, float* const* out) {
  for (int e = 0; e < d; e += kUnit) {
    F sum[N][2] = {};
    for (int i = 0; i < d; ++i) {
      const float* row = matrix + int64_t(i) * d + e;
      const F a = load<F>(row), b = load<F>(row + 8);
      for (int r = 0; r < N; ++r) {
        sum[r][0] += x[r][i] * a;
        sum[r][1] += x[r][i] * b;
      }
    }
    for (int r = 0; r < N; ++r) {
      save(out[r] + e, sum[r][0]);
      save(out[r] + e + 8, sum[r][1]);
    }
  }
}

void multiply(int rows, const float* const* x, const float* matrix, int d, float* const* out) {
  switch (rows) {
    case 1: return multiply_block<1>(x, matrix, d, out);
    case 2: return multiply_block<2>(x, matrix, d, out);
    case 3: return multiply_block<3>(x, matrix, d, out);
    default: return multiply_block<4>(x, matrix, d, out);
  }
}

// Apart, so that the compiler cannot contract this product with the sum in round_group.
__attribute__((noinline)) void scale_group(const float* x, int n, float inverse, float* out) {
  for (int i = 0; i < n; ++i) out[i] = x[i] * inverse;
}

__attribute__((noinline)) void round_group(const float* x, int n, float top, int8_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = int8_t(std::min(std::max(std::floor(x[i] + 0.5f), -top), top));
}

void encode_row(const float* y, int d, int groups, int bits, float* scratch, int8_t* codes, uint8_t* out, uint16_t* scales) {
  const int size = d / groups;
  const float top = float((1 << (bits - 1)) - 1);
  for (int g = 0; g < groups; ++g) {
    float largest = 0.0f;
    for (int i = g * size; i < (g + 1) * size; ++i) largest = std::max(largest, std::fabs(y[i]));
    scales[g] = to_float16(std::min(largest / top, kFloat16Max));
    const float step = from_float16(scales[g]);
    scale_group(y + g * size, size, step > 0.0f ? 1.0f / step : 0.0f, scratch);
    round_group(scratch, size, top, codes + g * size);
  }
  if (bits == 8) {
    std::memcpy(out, codes, size_t(d));
  } else {
    for (int i = 0; i < d / 2; ++i) out[i] = uint8_t((codes[2 * i] & 15) | (codes[2 * i + 1] << 4));
  }
}

struct Scratch {
  std::vector<float> scores, scales, rows;
  std::vector<int8_t> codes;
};

// One (request, KV head).
struct Job {
  int64_t request, new_tokens, length, from;
  int head, rows, splits;
  size_t buffer;  // queries [rows, d], then partial results
};

struct Partial {
  float *sums, *highest, *weight;  // [rows, d], [rows], [rows]
};

size_t partial_floats(int rows, int d) { return size_t(rows) * (d + 2); }

Partial partial_of(const Job& job, int d, int split, float* buffer) {
  float* sums = buffer + job.buffer + size_t(job.rows) * d + split * partial_floats(job.rows, d);
  return {sums, sums + int64_t(job.rows) * d, sums + int64_t(job.rows) * (d + 1)};
}

template <int Bits, int N>
void score_rows(const float* q, const uint8_t* codes, const float* scales, int keys, int d, int groups, float* scores) {
  const int units = d / groups / kUnit;
  for (int t = 0; t < keys; ++t) {
    F total[N] = {};
    for (int g = 0; g < groups; ++g) {
      const float scale = scales[t * groups + g];
      for (int u = g * units; u < (g + 1) * units; ++u) {
        F a, b;
        unpack<Bits>(codes + u * (kUnit * Bits / 8), a, b);
        a *= scale;
        b *= scale;
        for (int r = 0; r < N; ++r) {
          total[r] += a * load<F>(q + r * d + u * kUnit);
          total[r] += b * load<F>(q + r * d + u * kUnit + 8);
        }
      }
    }
    for (int r = 0; r < N; ++r) scores[r * kRun + t] = sum<8>(total[r]);
    codes += d * Bits / 8;
  }
}

template <int Bits, int N>
void mix_rows(const float* weights, const uint8_t* codes, const float* scales, int keys, int d, int groups, float* sums) {
  const int units = d / groups / kUnit;
  for (int u = 0; u < d / kUnit; ++u) {
    F sum[N][2];
    for (int r = 0; r < N; ++r) {
      sum[r][0] = load<F>(sums + r * d + u * kUnit);
      sum[r][1] = load<F>(sums + r * d + u * kUnit + 8);
    }
    const uint8_t* code = codes + u * (kUnit * Bits / 8);
    const float* scale = scales + u / units;
    for (int t = 0; t < keys; ++t) {
      F a, b;
      unpack<Bits>(code, a, b);
      a *= *scale;
      b *= *scale;
      for (int r = 0; r < N; ++r) {
        sum[r][0] += weights[r * kRun + t] * a;
        sum[r][1] += weights[r * kRun + t] * b;
      }
      code += d * Bits / 8;
      scale += groups;
    }
    for (int r = 0; r < N; ++r) {
      save(sums + r * d + u * kUnit, sum[r][0]);
      save(sums + r * d + u * kUnit + 8, sum[r][1]);
    }
  }
}

template <int Bits>
void score(int rows, const float* q, const uint8_t* codes, const float* scales, int keys, int d, int groups, float* scores) {
  for (int r = 0; r < rows; r += kBlock, q += kBlock * d, scores += kBlock * kRun) {
    switch (std::min(kBlock, rows - r)) {
      case 1: score_rows<Bits, 1>(q, codes, scales, keys, d, groups, scores); break;
      case 2: score_rows<Bits, 2>(q, codes, scales, keys, d, groups, scores); break;
      case 3: score_rows<Bits, 3>(q, codes, scales, keys, d, groups, scores); break;
      default: score_rows<Bits, 4>(q, codes, scales, keys, d, groups, scores);
    }
  }
}

template <int Bits>
void mix(int rows, const float* weights, const uint8_t* codes, const float* scales, int keys, int d, int groups, float* sums) {
  for (int r = 0; r < rows; r += kBlock, sums += kBlock * d, weights += kBlock * kRun) {
    switch (std::min(kBlock, rows - r)) {
      case 1: mix_rows<Bits, 1>(weights, codes, scales, keys, d, groups, sums); break;
      case 2: mix_rows<Bits, 2>(weights, codes, scales, keys, d, groups, sums); break;
      case 3: mix_rows<Bits, 3>(weights, codes, scales, keys, d, groups, sums); break;
      default: mix_rows<Bits, 4>(weights, codes, scales, keys, d, groups, sums);
    }
  }
}

void load_scales(const uint16_t* scales, int count, std::vector<float>& out) {
  out.resize(size_t(count) + 8);
  int i = 0;
  for (; i + 8 <= count; i += 8) save(out.data() + i, values<8, kFloat16>(reinterpret_cast<const char*>(scales), i));
  for (; i < count; ++i) out[size_t(i)] = from_float16(scales[i]);
}

// What the queries do not see becomes minus infinity.
void hide(const Attend& args, const Job& job, int64_t key, int count, float* scores) {
  for (int r = 0; r < job.rows; ++r) {
    float* score = scores + r * kRun;
    if (args.softcap > 0.0f)
      for (int t = 0; t < count; ++t) score[t] = args.softcap * tanh_of(score[t] / args.softcap);
    const int64_t token = r / args.ratio, position = job.length - job.new_tokens + token;
    for (int64_t t = std::max(int64_t(0), position + 1 - key); t < count; ++t) score[t] = kNone;
    if (args.window)
      for (int64_t t = std::min(int64_t(count), position - args.window + 1 - key) - 1; t >= 0; --t) score[t] = kNone;
    if (args.mask) {
      const uint8_t* seen = args.mask + job.request * args.mask_request + token * args.mask_token + key;
      for (int t = 0; t < count; ++t)
        if (!seen[t]) score[t] = kNone;
    }
  }
}

// Keys from … to of a job, into one partial result.
void attend_split(const Packed& packed, const Attend& args, const Job& job, const float* q, const Partial& out, int64_t from,
                  int64_t to, Scratch& scratch) {
  const int d = packed.head_dim, groups = packed.groups, rows = job.rows;
  std::fill(out.sums, out.sums + int64_t(rows) * d, 0.0f);
  std::fill(out.highest, out.highest + rows, kNone);
  std::fill(out.weight, out.weight + rows, 0.0f);
  scratch.scores.resize(size_t(rows) * kRun);
  float* scores = scratch.scores.data();
  const int32_t* pages = args.table + job.request * args.table_stride;
  for (int64_t key = from; key < to;) {
    const int64_t at = args.first + key, slot = at % packed.page_size;
    const int64_t row = (pages[at / packed.page_size] * int64_t(packed.heads) + job.head) * packed.page_size + slot;
    // Runs end where multiples of kRun do, so that they do not depend on where a window begins.
    const int count = int(std::min({to - key, packed.page_size - slot, kRun - key % kRun}));
    load_scales(packed.scales[0] + row * groups, count * groups, scratch.scales);
    const uint8_t* codes = packed.codes[0] + row * d * packed.bits[0] / 8;
    (packed.bits[0] == 4 ? score<4> : score<8>)(rows, q, codes, scratch.scales.data(), count, d, groups, scores);
    hide(args, job, key, count, scores);
    for (int r = 0; r < rows; ++r) {
      float* score = scores + r * kRun;
      float highest = out.highest[r];
      for (int t = 0; t < count; ++t) highest = std::max(highest, score[t]);
      if (highest > out.highest[r]) {
        const float keep = out.highest[r] == kNone ? 0.0f : exp_negative(out.highest[r] - highest);
        out.highest[r] = highest;
        out.weight[r] *= keep;
        for (int c = 0; c < d; ++c) out.sums[int64_t(r) * d + c] *= keep;
      }
      const float base = highest == kNone ? 0.0f : highest;
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int t = 0; t < count; ++t) {
        score[t] = exp_negative(score[t] - base);
        total += score[t];
      }
      out.weight[r] += total;
    }
    load_scales(packed.scales[1] + row * groups, count * groups, scratch.scales);
    codes = packed.codes[1] + row * d * packed.bits[1] / 8;
    (packed.bits[1] == 4 ? mix<4> : mix<8>)(rows, scores, codes, scratch.scales.data(), count, d, groups, out.sums);
    key += count;
  }
}

// Rotated queries of a job, channels in the order of unpacking.
void prepare(const Packed& packed, const Attend& args, const Job& job, float* q, Scratch& scratch) {
  const int d = packed.head_dim;
  scratch.rows.resize(size_t(2 * kBlock) * d);
  for (int begin = 0; begin < job.rows; begin += kBlock) {
    const int n = std::min(kBlock, job.rows - begin);
    const float* in[kBlock] = {};
    float* turned[kBlock] = {};
    for (int r = 0; r < n; ++r) {
      const int row = begin + r;
      const int64_t token = args.query_start[job.request] + row / args.ratio;
      const int64_t head = int64_t(job.head) * args.ratio + row % args.ratio;
      const float* source = args.q + (token * packed.heads * args.ratio + head) * d;
      float* scaled = scratch.rows.data() + r * d;
      for (int c = 0; c < d; ++c) scaled[c] = source[c] * args.scale;
      in[r] = scaled;
      turned[r] = scratch.rows.data() + (kBlock + r) * d;
    }
    multiply(n, in, args.k_read + int64_t(job.head) * d * d, d, turned);
    for (int r = 0; r < n; ++r)
      for (int u = 0; u < d; u += kUnit)
        for (int i = 0; i < kUnit; ++i) q[(begin + r) * d + u + i] = turned[r][u + channel(packed.bits[0], i)];
  }
}

// Merge the splits in order and turn the output back; a row that sees no key gives zeros.
void finish(const Packed& packed, const Attend& args, const Job& job, float* buffer, Scratch& scratch) {
  const int d = packed.head_dim;
  scratch.rows.resize(size_t(kBlock) * d);
  for (int begin = 0; begin < job.rows; begin += kBlock) {
    const int n = std::min(kBlock, job.rows - begin);
    const float* in[kBlock] = {};
    float* out[kBlock] = {};
    for (int r = 0; r < n; ++r) {
      const int row = begin + r;
      float highest = kNone, weight = 0.0f;
      for (int s = 0; s < job.splits; ++s) highest = std::max(highest, partial_of(job, d, s, buffer).highest[row]);
      float* joined = scratch.rows.data() + r * d;
      std::fill(joined, joined + d, 0.0f);
      for (int s = 0; s < job.splits; ++s) {
        const Partial part = partial_of(job, d, s, buffer);
        const float factor = part.highest[row] == kNone ? 0.0f : exp_negative(part.highest[row] - highest);
        weight += part.weight[row] * factor;
        for (int u = 0; u < d; u += kUnit)
          for (int i = 0; i < kUnit; ++i)
            joined[u + channel(packed.bits[1], i)] += part.sums[int64_t(row) * d + u + i] * factor;
      }
      for (int c = 0; c < d; ++c) joined[c] = weight > 0.0f ? joined[c] / weight : 0.0f;
      const int64_t token = args.query_start[job.request] + row / args.ratio;
      const int64_t head = int64_t(job.head) * args.ratio + row % args.ratio;
      in[r] = joined;
      out[r] = args.out + (token * packed.heads * args.ratio + head) * d;
    }
    multiply(n, in, args.v_read_t + int64_t(job.head) * d * d, d, out);
  }
}

}  // namespace
}  // namespace oscar

// Encode x [tokens, heads, d] (kv: 0 for K, 1 for V) with matrix [heads, d, d] into row slots[t] of page pages[t].
extern "C" void oscar_srft_store(const oscar::Packed* packed, int32_t kv, const float* x, const float* matrix,
                                 const int64_t* pages, const int64_t* slots, int32_t tokens, int32_t threads) {
  using namespace oscar;
  const int d = packed->head_dim, heads = packed->heads, bits = packed->bits[kv], groups = packed->groups;
  const int blocks = (tokens + kBlock - 1) / kBlock;
  // A row costs d * d; a few of them are not worth waking threads for.
  const int wanted = int64_t(tokens) * heads * d * d < 400000 ? 1 : threads;
  parallel_for(blocks * heads, wanted, [&](int job) {
    static thread_local Scratch scratch;
    scratch.rows.resize(size_t(2 * kBlock + 1) * d);
    scratch.codes.resize(size_t(d));
    float* rows = scratch.rows.data();
    const int head = job % heads, begin = job / heads * kBlock, n = std::min(kBlock, tokens - begin);
    const float* in[kBlock] = {};
    float* out[kBlock] = {};
    for (int r = 0; r < n; ++r) {
      const float* source = x + (int64_t(begin + r) * heads + head) * d;
      for (int c = 0; c < d; ++c) {  // NaN counts as 0
        const float value = source[c];
        rows[r * d + c] = value != value ? 0.0f : std::min(std::max(value, -kFloat16Max), kFloat16Max);
      }
      in[r] = rows + r * d;
      out[r] = rows + (kBlock + r) * d;
    }
    multiply(n, in, matrix + int64_t(head) * d * d, d, out);
    for (int r = 0; r < n; ++r) {
      const int64_t row = (pages[begin + r] * heads + head) * packed->page_size + slots[begin + r];
      encode_row(out[r], d, groups, bits, rows + 2 * kBlock * d, scratch.codes.data(),
                 packed->codes[kv] + row * d * bits / 8, packed->scales[kv] + row * groups);
    }
  });
}

// Attend for the chosen requests, few new tokens each.
extern "C" void oscar_srft_attend(const oscar::Packed* packed, const oscar::Attend* args) {
  using namespace oscar;
  static thread_local std::vector<float> buffer_storage;
  static thread_local std::vector<Job> job_storage;
  static thread_local std::vector<std::pair<int, int>> unit_storage;
  auto &jobs = job_storage;  // workers must see the caller's
  auto &units = unit_storage;
  jobs.clear();
  units.clear();
  const int d = packed->head_dim;
  size_t floats = 0;
  for (int n = 0; n < args->count; ++n) {
    Job job{};
    job.request = args->chosen[n];
    job.length = args->lengths[job.request];
    job.new_tokens = args->query_start[job.request + 1] - args->query_start[job.request];
    job.rows = int(job.new_tokens) * args->ratio;
    if (args->window) job.from = std::max(int64_t(0), job.length - job.new_tokens - args->window + 1);
    job.splits = int((job.length - 1) / kSplit - job.from / kSplit) + 1;
    for (job.head = 0; job.head < packed->heads; ++job.head) {
      job.buffer = floats;
      floats += size_t(job.rows) * d + job.splits * partial_floats(job.rows, d);
      for (int s = 0; s < job.splits; ++s) units.emplace_back(int(jobs.size()), s);
      jobs.push_back(job);
    }
  }
  if (buffer_storage.size() < floats) buffer_storage.resize(floats);
  float* buffer = buffer_storage.data();
  int64_t rotated = 0;
  for (const Job& job : jobs) rotated += int64_t(job.rows) * d * d;
  const int few = rotated < 400000 ? 1 : args->threads;
  parallel_for(int(jobs.size()), few, [&](int i) {
    static thread_local Scratch scratch;
    prepare(*packed, *args, jobs[size_t(i)], buffer + jobs[size_t(i)].buffer, scratch);
  });
  parallel_for(int(units.size()), args->threads, [&](int i) {
    static thread_local Scratch scratch;
    const Job& job = jobs[size_t(units[size_t(i)].first)];
    const int split = units[size_t(i)].second;
    const int64_t base = (job.from / kSplit + split) * kSplit;
    attend_split(*packed, *args, job, buffer + job.buffer, partial_of(job, d, split, buffer), std::max(base, job.from),
                 std::min(base + kSplit, job.length), scratch);
  });
  parallel_for(int(jobs.size()), few, [&](int i) {
    static thread_local Scratch scratch;
    finish(*packed, *args, jobs[size_t(i)], buffer, scratch);
  });
}
