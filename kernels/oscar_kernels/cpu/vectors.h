// Short vectors by the compilers' vector extension (GCC, Clang), so that one source serves AVX-512, AVX2 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#include "cache.h"

#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

namespace oscar {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int W>
struct Vec {
  typedef float f __attribute__((vector_size(W * 4)));
  typedef int32_t i __attribute__((vector_size(W * 4)));
  typedef uint8_t b __attribute__((vector_size(W)));
  typedef uint16_t h __attribute__((vector_size(W * 2)));
};

typedef Vec<16>::b Bytes;

template <class T>
inline T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}

template <class T>
inline void save(void* p, const T& x) {
  std::memcpy(p, &x, sizeof(T));
}

// W bytes as W integers. GCC makes scalar code of the conversion, hence the instructions by name where they are known.
template <int W>
inline typename Vec<W>::i widen(const uint8_t* p) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return typename Vec<W>::i(_mm512_cvtepu8_epi32(load<__m128i>(p)));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return typename Vec<W>::i(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
#if defined(__SSE4_1__)
  if constexpr (W == 4) return typename Vec<W>::i(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load<int32_t>(p))));
#endif
  typedef int16_t Short __attribute__((vector_size(W * 2)));
  return __builtin_convertvector(__builtin_convertvector(load<typename Vec<W>::b>(p), Short), typename Vec<W>::i);
}

// W integers masked, as floats.
template <int W>
inline typename Vec<W>::f masked(typename Vec<W>::i x, int32_t mask) {
  return __builtin_convertvector(x & mask, typename Vec<W>::f);
}

// W values of type T at index i, as floats.
template <int W, int T>
inline typename Vec<W>::f values(const char* data, int64_t i) {
  if constexpr (T == kFloat32) return load<typename Vec<W>::f>(data + 4 * i);
  const char* p = data + 2 * i;
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m256i h = load<__m256i>(p);
    if constexpr (T == kFloat16) return typename Vec<W>::f(_mm512_cvtph_ps(h));
    return typename Vec<W>::f(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
  }
#endif
#if defined(__AVX2__) && defined(__F16C__)
  if constexpr (W == 8) {
    const __m128i h = load<__m128i>(p);
    if constexpr (T == kFloat16) return typename Vec<W>::f(_mm256_cvtph_ps(h));
    return typename Vec<W>::f(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
  }
#endif
  if constexpr (T == kBFloat16) {
    typedef uint32_t U __attribute__((vector_size(W * 4)));
    return typename Vec<W>::f(__builtin_convertvector(load<typename Vec<W>::h>(p), U) << 16);
  }
  typename Vec<W>::f out = {};
  for (int n = 0; n < W; ++n) out[n] = from_float16(load<uint16_t>(p + 2 * n));
  return out;
}

template <int W>
inline float sum(typename Vec<W>::f x) {
  if constexpr (W == 4) {
    return (x[0] + x[1]) + (x[2] + x[3]);
  } else {
    typedef typename Vec<W / 2>::f Half;
    Half half[2];
    std::memcpy(half, &x, sizeof x);
    return sum<W / 2>(half[0] + half[1]);
  }
}

#if defined(__clang__)
#define OSCAR_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define OSCAR_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define OSCAR_LOW(a, b) __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23})
#define OSCAR_HIGH(a, b) __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})
#endif

// out[j * 16 + t] = in[t * stride + j] for 16 tokens t and 16 bytes j: interleaving rows i and i + 8 four times.
inline void transpose(const uint8_t* in, int64_t stride, uint8_t* out) {
  Bytes a[16], b[16];
  for (int t = 0; t < 16; ++t) a[t] = load<Bytes>(in + t * stride);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = OSCAR_LOW(a[i], a[i + 8]);
      b[2 * i + 1] = OSCAR_HIGH(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int j = 0; j < 16; ++j) save(out + 16 * j, a[j]);
}

// out[e] = sum_i x[i] * matrix[i][e], each added up in the order of i: a row's result does not depend on its batch.
inline void multiply_row(const float* x, const float* matrix, int d, float* out) {
  typedef Vec<8>::f F;
  int e = 0;
  for (; e + 64 <= d; e += 64) {
    F sum[8] = {};
    for (int i = 0; i < d; ++i) {
      const float* row = matrix + int64_t(i) * d + e;
      for (int n = 0; n < 8; ++n) sum[n] += x[i] * load<F>(row + 8 * n);
    }
    for (int n = 0; n < 8; ++n) save(out + e + 8 * n, sum[n]);
  }
  for (; e < d; e += 8) {
    F sum = {};
    for (int i = 0; i < d; ++i) sum += x[i] * load<F>(matrix + int64_t(i) * d + e);
    save(out + e, sum);
  }
}

// exp(x) for x <= 0 to about 1e-7 relative; exactly 0 below -87, at minus infinity too.
inline float exp_negative(float x) {
  float y = x < -87.0f ? -87.0f : x;
  float n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to an integer
  float r = y - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : p * power;
}

inline float tanh_of(float x) {
  float e = exp_negative(-2.0f * (x < 0.0f ? -x : x));
  float t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

}  // namespace oscar
