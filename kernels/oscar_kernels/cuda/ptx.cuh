// Single instructions: conversions, tensor-core products, asynchronous copies, loads; no state.

#pragma once

#include "params.cuh"

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 - 2 / (1 + e^2x): absolute error 1e-7, where tanh.approx has 5e-4.
__device__ __forceinline__ float tanh_(float x) { return 1.f - __fdividef(2.f, 1.f + ex2(2.f * 1.4426950408889634f * x)); }
__device__ __forceinline__ u32 pack16(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
// What fp16 leaves of x.
__device__ __forceinline__ float rest16(float x) { float r; asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "f"(x)); return x - r; }
__device__ __forceinline__ u32 packb16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float half_to_float(u32 h) { float f; asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h)); return f; }
__device__ __forceinline__ u32 transpose8x8(u32 x) { u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#if WIN_BF16
#define pack_win packb16
#define mma_win mma_bf16
__device__ __forceinline__ float low_of(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __int_as_float(x & 0xffff0000u); }
#else
#define pack_win pack16
#define mma_win mma_f16
__device__ __forceinline__ float low_of(u32 x) { return half_to_float(x & 0xffffu); }
__device__ __forceinline__ float high_of(u32 x) { return half_to_float(x >> 16); }
#endif
// A pair of floats as the sum of two 16-bit pairs: window keys are few, so exactness costs little.
__device__ __forceinline__ void split_win(float a, float b, u32& hi, u32& lo) {
  hi = pack_win(a, b);
  lo = pack_win(a - low_of(hi), b - high_of(hi));
}

__device__ __forceinline__ void copy16(u32 to_shared, const void* from) { asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared), "l"(from)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Adds 1 once all that this CTA wrote (before a barrier) is visible to the GPU; sees what earlier adders published.
__device__ __forceinline__ int arrive(int* counter) { int old; asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory"); return old; }

// Programmatic dependent launch: the next kernel may start once every CTA is running, and waits itself for the end of this
// one; what kernels in front wrote is visible after the wait only.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Streaming loads: every byte of the cache is read once.
__device__ __forceinline__ u32 ldg32(const void* p) { u32 r; asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(r) : "l"(p)); return r; }
__device__ __forceinline__ u32 ldg16(const void* p) { u16 r; asm("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(r) : "l"(p)); return r; }
template <int N> __device__ __forceinline__ void ldg(u32 (&r)[N], const void* p) {
  if constexpr (N == 1) r[0] = ldg32(p);
  else if constexpr (N == 2) asm("ld.global.nc.L1::no_allocate.v2.b32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
  else {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3]) : "l"((const u32*)p + i));
  }
}

#if META8
#define META_BYTES 2
// e4m3 shares fp16's layout seven bits down: exact for every finite value, subnormals included, up to the factor 256.
__device__ __forceinline__ float e4m3(u32 x) { return half_to_float(((x & 0x80u) << 8) | ((x & 0x7fu) << 7)) * 256.f; }
__device__ __forceinline__ void meta_pair(u32 raw, float unit, float& s, float& m) { s = e4m3(raw) * unit; m = e4m3(raw >> 8) * unit; }
#else
#define META_BYTES 4
__device__ __forceinline__ void meta_pair(u32 raw, float, float& s, float& m) { s = half_to_float(raw & 0xffffu); m = half_to_float(raw >> 16); }
#endif
// Shared-memory words of one lane.
template <int N> __device__ __forceinline__ void lds(u32 (&r)[N], const u8* p) {
  if constexpr (N == 1) r[0] = *(const u32*)p;
  else if constexpr (N == 2) { const uint2 x = *(const uint2*)p; r[0] = x.x; r[1] = x.y; }
  else {
#pragma unroll
    for (int i = 0; i < N; i += 4) { const uint4 x = *(const uint4*)(p + 4 * i); r[i] = x.x; r[i + 1] = x.y; r[i + 2] = x.z; r[i + 3] = x.w; }
  }
}
struct Meta { u32 raw[NG]; };  // (scale, minimum) of each group of one token
__device__ __forceinline__ void load_meta(Meta& x, const u8* p) {
#if META8
#pragma unroll
  for (int g = 0; g < NG; ++g) x.raw[g] = *(const u16*)(p + 2 * g);
#else
  lds<NG>(x.raw, p);
#endif
}
