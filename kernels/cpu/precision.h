// How weights, KV and activations are stored and multiplied: bf16 or fp32. See layout.h for `step`.
//
// `multiply` is the one inner loop of the whole step: R rows of activations against C vectors of columns. An output is a
// single chain of additions in the order of its inputs, so its bits do not depend on R, C, or who else is in the batch.
#pragma once

#include "simd.h"

namespace arena {

struct Fp32 {
  using Weight = float;
  using Act = float;
  using Row = vf;
  using Column = vf;
  static constexpr int step = 1;
  static constexpr int kRows = kRegisters == 32 ? 14 : 6;       // rows of a register tile of a linear layer
  static constexpr int kQueries = kRegisters == 32 ? 6 : 6;     // and of attention
  static ARENA_INLINE Row row(const Act* a) { return set(*a); }
  static ARENA_INLINE Column column(const Weight* w) { return load(w); }
  static ARENA_INLINE Column first_only(Column w) { return w; }
  static ARENA_INLINE vf dot(vf sum, Row a, Column w) { return fma(a, w, sum); }
  static ARENA_INLINE void store_act(Act* p, vf x) { store(p, x); }
  static ARENA_INLINE vf load_act(const Act* p) { return load(p); }
  static Act to_act(float x) { return x; }
  static float from_act(Act x) { return x; }
  static Weight to_weight(float x) { return x; }
  static float from_weight(Weight x) { return x; }
};

struct Bf16 {
  using Weight = bf16;
  static constexpr int step = 2;
  static Weight to_weight(float x) { return to_bf16(x); }
  static float from_weight(Weight x) { return from_bf16(x); }
#if ARENA_BF16_DOT
  using Act = bf16;
  using Row = Pairs;
  using Column = Pairs;
  static constexpr int kRows = 14;
  static constexpr int kQueries = 6;
  static ARENA_INLINE Row row(const Act* a) { return set_pair(a); }
  static ARENA_INLINE Column column(const Weight* w) { return load_pairs(w); }
  static ARENA_INLINE Column first_only(Column w) { return first_of_pairs(w); }
  static ARENA_INLINE vf dot(vf sum, Row a, Column w) { return dot_pairs(sum, w, a); }
  static ARENA_INLINE void store_act(Act* p, vf x) { store_bf16(p, x); }
  static ARENA_INLINE vf load_act(const Act* p) { return load_bf16(p); }
  static Act to_act(float x) { return to_bf16(x); }
  static float from_act(Act x) { return from_bf16(x); }
#else
  struct Two {
    vf even, odd;
  };
  using Act = float;
  using Row = Two;
  using Column = Two;
  static constexpr int kRows = kRegisters == 32 ? 12 : 4;
  static constexpr int kQueries = 4;
  static ARENA_INLINE Row row(const Act* a) { return {set(a[0]), set(a[1])}; }
  static ARENA_INLINE Column column(const Weight* w) {
    Column result;
    load_wide(w, result.even, result.odd);
    return result;
  }
  static ARENA_INLINE Column first_only(Column w) { return {w.even, zero()}; }
  static ARENA_INLINE vf dot(vf sum, Row a, Column w) { return fma(a.odd, w.odd, fma(a.even, w.even, sum)); }
  static ARENA_INLINE void store_act(Act* p, vf x) { store(p, round_to_bf16(x)); }
  static ARENA_INLINE vf load_act(const Act* p) { return load(p); }
  static Act to_act(float x) { return from_bf16(to_bf16(x)); }
  static float from_act(Act x) { return x; }
#endif
};

// acc[r][c] += a[r] . column c, over steps first .. end - 1. column(k, c) is the address of vector c at step k.
template <class P, bool kFirstOnly = false, int R, int C, class Address>
ARENA_INLINE void multiply(vf (&acc)[R][C], const typename P::Act* a, size_t stride, Address column, int first, int end) {
  for (int k = first; k < end; k++) {
    typename P::Column w[C];
    ARENA_UNROLL
    for (int c = 0; c < C; c++) {
      w[c] = P::column(column(k, c));
      if (kFirstOnly) w[c] = P::first_only(w[c]);
    }
    ARENA_UNROLL
    for (int r = 0; r < R; r++) {
      const typename P::Row x = P::row(a + r * stride + k * P::step);
      ARENA_UNROLL
      for (int c = 0; c < C; c++) acc[r][c] = P::dot(acc[r][c], x, w[c]);
    }
  }
}

template <int R, int C>
ARENA_INLINE void clear(vf (&acc)[R][C]) {
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  }
}

}  // namespace arena
