// Attention straight from the pages, for decode rows and prefill chunks alike.
//
// Tokens are taken in tiles of kTile, cut at absolute positions. In a tile: scores, their maximum, exp, product with V;
// then the tile is folded into the row's state (maximum, sum, output), as FlashAttention does. What a row gets depends on
// its own position alone: tiles are folded in order; scores that it may not see become -inf, so that K never written, be
// it NaN, counts for nothing; those tokens add exact zeros; V beyond the last token is not multiplied at all. Hence the
// tiles of a long decode may be computed by different threads and folded by the last of them, to the same bits.
#pragma once

#include <limits>

#include "layout.h"
#include "linear.h"

namespace arena {

constexpr int kTile = 256;
constexpr int kTileUnits = kTile / kBlockTokens;
constexpr int kUnitVectors = kBlockTokens / kLanes;
constexpr int kScoreUnits = kLanes == 16 ? 4 : 1;        // units whose scores are computed together
constexpr int kUnitsAhead = 4;                           // how early a unit is prefetched
constexpr int kValueVectors = kRegisters == 32 ? 4 : 2;  // vectors of V that are summed together

// Query rows of one kv head, [row][head_dim] in memory: neighbouring tokens, each with the heads of the group.
template <class P>
struct Queries {
  const typename P::Act* q;
  int rows, group, head_dim, first_position, window;  // window 0 = all tokens
  float scale;      // of scores, times log2(e): softmax is taken in powers of two
  float cap_scale;  // where scores are soft-capped, of what becomes their tanh before `scale`; else 0

  int position(int row) const { return first_position + row / group; }
  int begin(int row) const { return window ? std::max(0, position(row) + 1 - window) : 0; }
  int end(int row) const { return position(row) + 1; }
};

// The K and V units that a block of queries needs of one tile, in the order in which they are read, and the first that
// are read after them, so that each can be brought nearer a few units ahead.
template <class P>
struct Tile {
  const typename P::Weight* unit[2 * kTileUnits + kUnitsAhead];
  int units = 0, start = 0;  // `start` is the position of the first token of the first unit

  const typename P::Weight* k(int number) const { return unit[number]; }
  const typename P::Weight* v(int number) const { return unit[units + number]; }
  void follow_with(const Tile& next) {
    for (int i = 0; i < kUnitsAhead; i++) unit[2 * units + i] = next.unit[i];
  }
};

// What is known of some rows after some tiles; sum and output are relative to 2^maximum.
struct State {
  float* maximum;  // [row], of scaled scores
  float* sum;      // [row][kLanes], its lanes not yet added up
  float* output;   // [row][head_dim]

  static int64_t floats(int64_t rows, int head_dim) { return rows * (2 * kLanes + head_dim); }
  State(float* memory, int64_t rows) : maximum(memory), sum(memory + rows * kLanes), output(sum + rows * kLanes) {}

  void reset(int64_t rows, int head_dim) const {
    std::fill_n(maximum, rows, -1e30f);
    std::fill_n(sum, rows * kLanes, 0.f);
    std::fill_n(output, rows * head_dim, 0.f);
  }
};

// The factors that bring two partial results to their common maximum.
struct Fold {
  float maximum, old_factor, new_factor;
  Fold() = default;
  Fold(float old_maximum, float new_maximum) : maximum(old_maximum > new_maximum ? old_maximum : new_maximum) {
    float factors[kLanes];
    store(factors, exp2(keep_lanes(set(new_maximum - maximum), 1, kLanes, old_maximum - maximum)));
    old_factor = factors[0];
    new_factor = factors[1];
  }
  ARENA_INLINE void add_to(float* old_values, vf new_values) const {
    store(old_values, fma(load(old_values), set(old_factor), mul(new_values, set(new_factor))));
  }
};

// Folds the state of a later tile into that of the earlier ones, with the arithmetic of attend_strip.
inline void fold_state(const State& state, const State& later, int rows, int head_dim) {
  for (int row = 0; row < rows; row++) {
    const Fold fold(state.maximum[row], later.maximum[row]);
    state.maximum[row] = fold.maximum;
    fold.add_to(state.sum + row * kLanes, load(later.sum + row * kLanes));
    for (int dim = row * head_dim; dim < (row + 1) * head_dim; dim += kLanes)
      fold.add_to(state.output + dim, load(later.output + dim));
  }
}

// scores [R][kTile] of U neighbouring units
template <class P, int R, int U>
ARENA_INLINE void score_units(const typename P::Act* q, int head_dim, const Tile<P>& tile, int unit, float* scores) {
  constexpr int C = U * kUnitVectors;
  vf acc[R][C];
  clear(acc);
  const auto column = [&](int step, int c) {
    const int offset = (step * kUnitVectors + c % kUnitVectors) * kLanes * P::step;
    prefetch_l2(tile.unit[unit + kUnitsAhead + c / kUnitVectors] + offset);
    return tile.k(unit + c / kUnitVectors) + offset;
  };
  multiply<P>(acc, q, head_dim, column, 0, head_dim / P::step);
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < C; c++) store(scores + r * kTile + unit * kBlockTokens + c * kLanes, acc[r][c]);
  }
}

// Apart, so that those who cap nothing run the code that they would without.
__attribute__((noinline)) inline void cap_scores(float* scores, int tokens, float cap_scale) {
  for (int t = 0; t < tokens; t += kLanes) store(scores + t, tanh(mul(load(scores + t), set(cap_scale))));
}

// p = 2^(scale * score - maximum) of the tokens that a row sees, 0 for the others. Returns the maximum.
template <class P>
float soften(float* scores, const Tile<P>& tile, int begin, int end, float scale, typename P::Act* p, float* sum) {
  const int tokens = tile.units * kBlockTokens;
  begin -= tile.start;
  end -= tile.start;
  if (begin > 0 || end < tokens) {
    for (int t = 0; t < tokens; t += kLanes) {
      const int first = std::clamp(begin - t, 0, kLanes), last = std::clamp(end - t, first, kLanes);
      store(scores + t, keep_lanes(load(scores + t), first, last, -std::numeric_limits<float>::infinity()));
    }
  }
  vf highest = set(-1e30f), total = zero();
  for (int t = 0; t < tokens; t += kLanes) highest = max(load(scores + t), highest);
  const float maximum = max_of_lanes(highest) * scale;
  for (int t = 0; t < tokens; t += kLanes) {
    const vf e = exp2(fma(load(scores + t), set(scale), set(-maximum)));
    total = add(total, e);
    P::store_act(p + t, e);
  }
  store(sum, total);
  return maximum;
}

// Folds p [R][kTile] times C vectors of V into output [R][head_dim]
template <class P, int R, int C>
ARENA_INLINE void add_values(const typename P::Act* p, const Tile<P>& tile, int tokens, int head_dim,
                             int dim, float* output, const Fold* folds) {
  constexpr int kUnitSteps = kBlockTokens / P::step;
  vf acc[R][C];
  clear(acc);
  int unit = 0;
  const auto column = [&](int step, int c) {
    const int offset = (step * head_dim + dim + c * kLanes) * P::step;
    prefetch_l2(tile.unit[tile.units + unit + kUnitsAhead] + offset);
    return tile.v(unit) + offset;
  };
  const int whole = tokens / P::step;  // steps all of whose tokens are there
  for (int step = 0; step < whole; step += kUnitSteps, unit++)
    multiply<P>(acc, p + unit * kBlockTokens, kTile, column, 0, std::min(whole - step, kUnitSteps));
  if (whole * P::step < tokens) {
    unit = tokens / kBlockTokens;
    multiply<P, true>(acc, p + unit * kBlockTokens, kTile, column, whole % kUnitSteps, whole % kUnitSteps + 1);
  }
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < C; c++) folds[r].add_to(output + r * head_dim + dim + c * kLanes, acc[r][c]);
  }
}

// Folds a tile into the state of R query rows from `row` on. scores and p are [P::kQueries][kTile].
template <class P, int R>
void attend_strip(const Queries<P>& queries, int row, const Tile<P>& tile, const State& state,
                  float* scores, typename P::Act* p) {
  const int head_dim = queries.head_dim;
  const typename P::Act* q = queries.q + row * head_dim;
  int unit = 0;
  for (; unit + kScoreUnits <= tile.units; unit += kScoreUnits) score_units<P, R, kScoreUnits>(q, head_dim, tile, unit, scores);
  for (; unit < tile.units; unit++) score_units<P, R, 1>(q, head_dim, tile, unit, scores);

  Fold folds[R];
  for (int r = 0; r < R; r++) {
    float sum[kLanes];
    const int begin = queries.begin(row + r), end = queries.end(row + r);
    if (queries.cap_scale) cap_scores(scores + r * kTile, tile.units * kBlockTokens, queries.cap_scale);
    const float maximum = soften<P>(scores + r * kTile, tile, begin, end, queries.scale, p + r * kTile, sum);
    folds[r] = Fold(state.maximum[row + r], maximum);
    state.maximum[row + r] = folds[r].maximum;
    folds[r].add_to(state.sum + (row + r) * kLanes, load(sum));
  }

  const int tokens = std::min(tile.units * kBlockTokens, queries.end(queries.rows - 1) - tile.start);
  float* output = state.output + row * head_dim;
  int dim = 0;
  for (; dim + kValueVectors * kLanes <= head_dim; dim += kValueVectors * kLanes)
    add_values<P, R, kValueVectors>(p, tile, tokens, head_dim, dim, output, folds);
  for (; dim < head_dim; dim += kLanes) add_values<P, R, 1>(p, tile, tokens, head_dim, dim, output, folds);
}

template <class P>
using AttendStrip = void (*)(const Queries<P>&, int, const Tile<P>&, const State&, float*, typename P::Act*);

template <class P, int... R>
constexpr std::array<AttendStrip<P>, sizeof...(R)> strip_kernels(std::integer_sequence<int, R...>) {
  return {attend_strip<P, R + 1>...};
}

// Folds a tile into the state of all rows of a block of queries.
template <class P>
void attend_tile(const Queries<P>& queries, const Tile<P>& tile, const State& state) {
  static constexpr auto kernels = strip_kernels<P>(std::make_integer_sequence<int, P::kQueries>());
  alignas(64) float scores[P::kQueries * kTile];
  alignas(64) typename P::Act p[P::kQueries * kTile];
  const int strips = (queries.rows + P::kQueries - 1) / P::kQueries;
  for (int strip = 0; strip < strips; strip++) {
    const int top = queries.rows * strip / strips, bottom = queries.rows * (strip + 1) / strips;
    kernels[bottom - top - 1](queries, top, tile, state, scores, p);
  }
}

}  // namespace arena
