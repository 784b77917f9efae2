// A vector of floats as wide as the processor's, and the few operations that the kernels need of it.
//
// The compiler's own macros choose one of: AVX-512 (with or without BF16 dot products), AVX2 + FMA, NEON, or plain C++
// (also with -DARENA_SCALAR). Where there is no BF16 dot product, pairs of bf16 are widened to fp32 and multiplied with
// two fused multiply-adds. All lanes are independent of one another, so a lane's value never depends on its neighbours.
//
// A vector of integers, `vi`, sums products of bytes: in every lane four weights (from -127 to 127) times four activations
// (the same in every lane). No sum is ever rounded, so all of these give the same integers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if !defined(ARENA_SCALAR) && defined(__AVX2__)
#include <immintrin.h>
#elif !defined(ARENA_SCALAR) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define ARENA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define ARENA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ARENA_UNROLL _Pragma("GCC unroll 64")
#endif

namespace arena {

using bf16 = uint16_t;

// Nearest, ties to even; a NaN stays one.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// ---------------------------------------------------------------------------------------------------------- AVX-512
#if !defined(ARENA_SCALAR) && defined(__AVX512BW__)

using vf = __m512;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;

ARENA_INLINE vf zero() { return _mm512_setzero_ps(); }
ARENA_INLINE vf set(float x) { return _mm512_set1_ps(x); }
ARENA_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
ARENA_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
ARENA_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
ARENA_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
ARENA_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
ARENA_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
ARENA_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
ARENA_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
ARENA_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }  // b where either is NaN
ARENA_INLINE vf round(vf a) { return _mm512_roundscale_ps(a, 0); }
ARENA_INLINE vf times_power_of_two(vf a, vf n) { return _mm512_scalef_ps(a, n); }
// 0 where x < limit, else y.
ARENA_INLINE vf zero_below(vf x, float limit, vf y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_NLT_UQ), y);
}
ARENA_INLINE float sum_of_lanes(vf x) { return _mm512_reduce_add_ps(x); }
ARENA_INLINE float max_of_lanes(vf x) { return _mm512_reduce_max_ps(x); }
// Lanes first .. end - 1 of x, `otherwise` in the others.
ARENA_INLINE vf keep_lanes(vf x, int first, int end, float otherwise) {
  const uint32_t mask = ((1u << end) - 1) & ~((1u << first) - 1);
  return _mm512_mask_mov_ps(set(otherwise), static_cast<__mmask16>(mask), x);
}
ARENA_INLINE vf load_bf16(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

using vi = __m512i;
ARENA_INLINE vi set_whole(int32_t x) { return _mm512_set1_epi32(x); }
ARENA_INLINE vf to_floats(vi x) { return _mm512_cvtepi32_ps(x); }
ARENA_INLINE __m512i set_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
#if defined(__AVX512VNNI__)
// The processor multiplies unsigned bytes by signed ones: every weight gets 128 more, and a sum starts with as much less.
using Weights4 = __m512i;
using Acts4 = __m512i;
ARENA_INLINE Weights4 load_weights4(const int8_t* p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)); }
ARENA_INLINE Acts4 set_acts4(const int8_t* p) { return set_bytes(p); }
constexpr int kWeightExcess = 128;
ARENA_INLINE vi dot4(vi sum, Weights4 w, Acts4 a) { return _mm512_dpbusd_epi32(sum, w, a); }
#else
struct Weights4 {
  __m512i even, odd;  // widened to 16 bits
};
using Acts4 = Weights4;
ARENA_INLINE Weights4 widened(__m512i x) { return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)}; }
ARENA_INLINE Weights4 load_weights4(const int8_t* p) { return widened(_mm512_loadu_si512(p)); }
ARENA_INLINE Acts4 set_acts4(const int8_t* p) { return widened(set_bytes(p)); }
constexpr int kWeightExcess = 0;
ARENA_INLINE vi dot4(vi sum, Weights4 w, Acts4 a) {
  return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(w.even, a.even), _mm512_madd_epi16(w.odd, a.odd)));
}
#endif

#if defined(__AVX512BF16__)
#define ARENA_BF16_DOT 1
constexpr const char* kIsa = "avx512bf16";
ARENA_INLINE void store_bf16(bf16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
using Pairs = __m512bh;
ARENA_INLINE Pairs load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
ARENA_INLINE Pairs set_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
ARENA_INLINE Pairs first_of_pairs(Pairs x) {
  return (__m512bh)_mm512_and_si512((__m512i)x, _mm512_set1_epi32(0xffff));
}
ARENA_INLINE vf dot_pairs(vf sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
#else
constexpr const char* kIsa = "avx512";
ARENA_INLINE vf round_to_bf16(vf x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i nearest = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                                _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
  return _mm512_castsi512_ps(_mm512_and_si512(nearest, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
ARENA_INLINE void load_wide(const bf16* p, vf& even, vf& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
#endif

// ------------------------------------------------------------------------------------------------------- AVX2 + FMA
#elif !defined(ARENA_SCALAR) && defined(__AVX2__) && defined(__FMA__)

using vf = __m256;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr const char* kIsa = "avx2";

ARENA_INLINE vf zero() { return _mm256_setzero_ps(); }
ARENA_INLINE vf set(float x) { return _mm256_set1_ps(x); }
ARENA_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
ARENA_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
ARENA_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
ARENA_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
ARENA_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
ARENA_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
ARENA_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
ARENA_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
ARENA_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
ARENA_INLINE vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ARENA_INLINE vf times_power_of_two(vf a, vf n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
ARENA_INLINE vf zero_below(vf x, float limit, vf y) { return _mm256_and_ps(_mm256_cmp_ps(x, set(limit), _CMP_NLT_UQ), y); }
ARENA_INLINE vf keep_lanes(vf x, int first, int end, float otherwise) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane), inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return _mm256_blendv_ps(set(otherwise), x, _mm256_castsi256_ps(_mm256_andnot_si256(below, inside)));
}
ARENA_INLINE vf load_bf16(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
ARENA_INLINE vf round_to_bf16(vf x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const vf quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000)));
  const vf nearest = _mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_and_ps(nearest, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
ARENA_INLINE void load_wide(const bf16* p, vf& even, vf& odd) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

using vi = __m256i;
struct Weights4 {
  __m256i even, odd;  // widened to 16 bits
};
using Acts4 = Weights4;
ARENA_INLINE vi set_whole(int32_t x) { return _mm256_set1_epi32(x); }
ARENA_INLINE vf to_floats(vi x) { return _mm256_cvtepi32_ps(x); }
ARENA_INLINE Weights4 widened(__m256i x) { return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)}; }
ARENA_INLINE Weights4 load_weights4(const int8_t* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
ARENA_INLINE Acts4 set_acts4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return widened(_mm256_set1_epi32(four));
}
constexpr int kWeightExcess = 0;
ARENA_INLINE vi dot4(vi sum, Weights4 w, Acts4 a) {
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(w.even, a.even), _mm256_madd_epi16(w.odd, a.odd)));
}

// ------------------------------------------------------------------------------------------------------------- NEON
#elif !defined(ARENA_SCALAR) && defined(__ARM_NEON) && defined(__aarch64__)

using vf = float32x4_t;
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
constexpr const char* kIsa = "neon";

ARENA_INLINE vf zero() { return vdupq_n_f32(0); }
ARENA_INLINE vf set(float x) { return vdupq_n_f32(x); }
ARENA_INLINE vf load(const float* p) { return vld1q_f32(p); }
ARENA_INLINE void store(float* p, vf x) { vst1q_f32(p, x); }
ARENA_INLINE vf add(vf a, vf b) { return vaddq_f32(a, b); }
ARENA_INLINE vf sub(vf a, vf b) { return vsubq_f32(a, b); }
ARENA_INLINE vf mul(vf a, vf b) { return vmulq_f32(a, b); }
ARENA_INLINE vf div(vf a, vf b) { return vdivq_f32(a, b); }
ARENA_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
ARENA_INLINE vf max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ARENA_INLINE vf min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
ARENA_INLINE vf round(vf a) { return vrndnq_f32(a); }
ARENA_INLINE vf times_power_of_two(vf a, vf n) {
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
ARENA_INLINE vf zero_below(vf x, float limit, vf y) { return vbslq_f32(vcltq_f32(x, set(limit)), zero(), y); }
ARENA_INLINE vf keep_lanes(vf x, int first, int end, float otherwise) {
  const int32_t numbers[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(numbers);
  const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(end)));
  return vbslq_f32(inside, x, set(otherwise));
}
ARENA_INLINE vf load_bf16(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
ARENA_INLINE vf round_to_bf16(vf x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t nearest = vbslq_u32(vceqq_f32(x, x), up, vorrq_u32(bits, vdupq_n_u32(0x400000)));
  return vreinterpretq_f32_u32(vandq_u32(nearest, vdupq_n_u32(0xffff0000)));
}
ARENA_INLINE void load_wide(const bf16* p, vf& even, vf& odd) {
  const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(p));
  even = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000)));
}

using vi = int32x4_t;
using Weights4 = int8x16_t;
using Acts4 = int8x16_t;
ARENA_INLINE vi set_whole(int32_t x) { return vdupq_n_s32(x); }
ARENA_INLINE vf to_floats(vi x) { return vcvtq_f32_s32(x); }
ARENA_INLINE Weights4 load_weights4(const int8_t* p) { return vld1q_s8(p); }
ARENA_INLINE Acts4 set_acts4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
constexpr int kWeightExcess = 0;
ARENA_INLINE vi dot4(vi sum, Weights4 w, Acts4 a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, a);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

// -------------------------------------------------------------------------------------------------------- plain C++
#else

constexpr int kLanes = 4;
constexpr int kRegisters = 16;
constexpr const char* kIsa = "scalar";
struct vf {
  float lane[kLanes];
};

template <class F>
ARENA_INLINE vf each_lane(F f) {
  vf result;
  for (int i = 0; i < kLanes; i++) result.lane[i] = f(i);
  return result;
}
ARENA_INLINE vf set(float x) { return each_lane([&](int) { return x; }); }
ARENA_INLINE vf zero() { return set(0); }
ARENA_INLINE vf load(const float* p) { return each_lane([&](int i) { return p[i]; }); }
ARENA_INLINE void store(float* p, vf x) { std::memcpy(p, x.lane, sizeof x.lane); }
ARENA_INLINE vf add(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] + b.lane[i]; }); }
ARENA_INLINE vf sub(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] - b.lane[i]; }); }
ARENA_INLINE vf mul(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] * b.lane[i]; }); }
ARENA_INLINE vf div(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] / b.lane[i]; }); }
// Rounded twice: std::fma would be a library call a lane on a processor without the instruction.
ARENA_INLINE vf fma(vf a, vf b, vf c) { return each_lane([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
ARENA_INLINE vf max(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
ARENA_INLINE vf min(vf a, vf b) { return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
ARENA_INLINE vf round(vf a) { return each_lane([&](int i) { return std::nearbyint(a.lane[i]); }); }
ARENA_INLINE vf times_power_of_two(vf a, vf n) {
  return each_lane([&](int i) {
    const bool in_range = n.lane[i] >= -126 && n.lane[i] <= 127;  // a NaN is not; an int could not hold it
    const uint32_t bits = static_cast<uint32_t>(in_range ? static_cast<int>(n.lane[i]) + 127 : 0) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return in_range ? a.lane[i] * power : a.lane[i] * n.lane[i];
  });
}
ARENA_INLINE vf zero_below(vf x, float limit, vf y) { return each_lane([&](int i) { return x.lane[i] < limit ? 0 : y.lane[i]; }); }
ARENA_INLINE vf keep_lanes(vf x, int first, int end, float otherwise) {
  return each_lane([&](int i) { return i >= first && i < end ? x.lane[i] : otherwise; });
}
ARENA_INLINE vf load_bf16(const bf16* p) { return each_lane([&](int i) { return from_bf16(p[i]); }); }
ARENA_INLINE vf round_to_bf16(vf x) { return each_lane([&](int i) { return from_bf16(to_bf16(x.lane[i])); }); }
ARENA_INLINE void load_wide(const bf16* p, vf& even, vf& odd) {
  even = each_lane([&](int i) { return from_bf16(p[2 * i]); });
  odd = each_lane([&](int i) { return from_bf16(p[2 * i + 1]); });
}

struct vi {
  int32_t lane[kLanes];
};
using Weights4 = const int8_t*;
using Acts4 = const int8_t*;
ARENA_INLINE vi set_whole(int32_t x) { return {x, x, x, x}; }
ARENA_INLINE vf to_floats(vi x) { return each_lane([&](int i) { return static_cast<float>(x.lane[i]); }); }
ARENA_INLINE Weights4 load_weights4(const int8_t* p) { return p; }
ARENA_INLINE Acts4 set_acts4(const int8_t* p) { return p; }
constexpr int kWeightExcess = 0;
ARENA_INLINE vi dot4(vi sum, Weights4 w, Acts4 a) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < 4; j++) sum.lane[i] += w[4 * i + j] * a[j];
  return sum;
}

#endif

// ------------------------------------------------------------------------------------------- the same on all of them

#if !defined(__AVX512BW__) || defined(ARENA_SCALAR)
template <class Combine>
inline float fold_lanes(vf x, Combine combine) {
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] = combine(lane[i], lane[i + width]);
  return lane[0];
}
inline float sum_of_lanes(vf x) {
  return fold_lanes(x, [](float a, float b) { return a + b; });
}
inline float max_of_lanes(vf x) {
  return fold_lanes(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

// 2^(n + r) for a whole n and |r| <= 1/2, within 1.5 units in the last place; 0 where n + r, being x, is below the range
// of normal numbers. The polynomial is that of Cephes' exp2f.
ARENA_INLINE vf exp2_of_parts(vf n, vf r, vf x) {
  vf p = fma(set(1.535336188319500e-4f), r, set(1.339887440266574e-3f));
  p = fma(p, r, set(9.618437357674640e-3f));
  p = fma(p, r, set(5.550332471162809e-2f));
  p = fma(p, r, set(2.402264791363012e-1f));
  p = fma(p, r, set(6.931472028550421e-1f));
  p = fma(p, r, set(1.f));
  return zero_below(x, -126.f, times_power_of_two(p, n));
}

constexpr float kLog2E = 1.44269504088896341f;

// x <= 127
ARENA_INLINE vf exp2(vf x) {
  const vf n = round(x);
  return exp2_of_parts(n, sub(x, n), x);
}

// x <= 88; log2(e) in two pieces, so that a large x loses nothing
ARENA_INLINE vf exp(vf x) {
  const vf scaled = mul(x, set(kLog2E)), n = round(scaled);
  const vf r = fma(x, set(1.92596299e-8f), fma(x, set(kLog2E), sub(zero(), n)));
  return exp2_of_parts(n, r, scaled);
}

// 1 / (1 + e^-x)
ARENA_INLINE vf sigmoid(vf x) { return div(set(1.f), add(set(1.f), exp(min(set(88.f), sub(zero(), x))))); }

// Within 6 units in the last place, also near 0, where 1 - e^-x would cancel: the odd rational function of Eigen and
// XNNPACK. Beyond the clamp it is 1 in fp32; a NaN stays one.
ARENA_INLINE vf tanh(vf x) {
  x = min(set(7.90531110763549805f), max(set(-7.90531110763549805f), x));
  const vf square = mul(x, x);
  vf p = fma(set(-2.76076847742355e-16f), square, set(2.00018790482477e-13f));
  p = fma(p, square, set(-8.60467152213735e-11f));
  p = fma(p, square, set(5.12229709037114e-08f));
  p = fma(p, square, set(1.48572235717979e-05f));
  p = fma(p, square, set(6.37261928875436e-04f));
  p = fma(p, square, set(4.89352455891786e-03f));
  vf q = fma(set(1.19825839466702e-06f), square, set(1.18534705686654e-04f));
  q = fma(q, square, set(2.26843463243900e-03f));
  q = fma(q, square, set(4.89352518554385e-03f));
  return div(mul(x, p), q);
}

ARENA_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
ARENA_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Denormals count as zero while it lives: the same on every thread that computes, whatever its program had set.
class DenormalsOff {
#if defined(__x86_64__)
 public:
  DenormalsOff() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~DenormalsOff() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
 public:
  DenormalsOff() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1ull << 24));
  }
  ~DenormalsOff() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  unsigned long long before_;
#endif
};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace arena
