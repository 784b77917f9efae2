// Linear layers over packed panels: rows of activations in, tiles of fp32 outputs handed to a sink.
//
// Work is cut into (block of rows) x (panel). A decode has one block of rows, so each thread streams its own run of panels
// from memory once; a prefill has many, so each thread keeps a block of activations in its L2 while the panels pass by.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "precision.h"
#include "team.h"

namespace arena {

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;

// With fewer rows the time goes into reading weights, which the processor's own prefetching does best (30 GB/s against 20
// a core, measured); with more into arithmetic, during which the next panel can come (at 8 rows 200 against 160 GFLOP/s).
// Of several strips of rows the first two bring half of it each, so that memory is asked for less at a time.
constexpr int kRowsToPrefetch = 6;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <class P>
struct Linear {
  const typename P::Weight* panels = nullptr;
  int64_t panel_count = 0;
  int steps = 0;  // inputs / P::step, padded

  const typename P::Weight* panel(int64_t number) const { return panels + number * steps * kPanel * P::step; }
};

// tile [R][kPanel] = a [R rows] times one panel. On the way kAhead vectors a step are brought into the L2 cache, from
// `next` on: with 2 a whole panel, with 1 half of one.
template <class P, int kAhead, int R>
void multiply_panel(const typename P::Act* a, size_t stride, const typename P::Weight* panel, int steps, float* tile,
                    const typename P::Weight* next) {
  constexpr int kVector = kLanes * P::step;
  vf acc[R][kPanelVectors];
  clear(acc);
  const auto column = [&](int step, int c) {
    if (c < kAhead) prefetch_l2(next + (step * kAhead + c) * kVector);
    return panel + (step * kPanelVectors + c) * kVector;
  };
  multiply<P>(acc, a, stride, column, 0, steps);
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < kPanelVectors; c++) store(tile + r * kPanel + c * kLanes, acc[r][c]);
  }
}

template <class P>
using MultiplyPanel = void (*)(const typename P::Act*, size_t, const typename P::Weight*, int, float*,
                               const typename P::Weight*);

template <class P, int kAhead, int... R>
constexpr std::array<MultiplyPanel<P>, sizeof...(R)> panel_kernels(std::integer_sequence<int, R...>) {
  return {multiply_panel<P, kAhead, R + 1>...};
}

// Calls sink(row, panel, values [kPanel]) for every row and panel, on the thread that computed them.
template <class P, class Sink>
void linear(Team& team, const typename P::Act* a, size_t stride, int64_t rows, const Linear<P>& layer, Sink sink) {
  if (rows == 0) return;  // a prefill that wants no logits
  constexpr auto kEachCount = std::make_integer_sequence<int, P::kRows>();
  static constexpr std::array<MultiplyPanel<P>, P::kRows> kernels[] = {
      panel_kernels<P, 0>(kEachCount), panel_kernels<P, 1>(kEachCount), panel_kernels<P, 2>(kEachCount)};  // by kAhead
  constexpr int64_t kBlockBytes = 192 * 1024;  // of activations, so that they, their outputs and a panel fit a common L2
  constexpr int64_t kChunkProducts = 16 * 1024;  // about a microsecond
  const int64_t row_bytes = static_cast<int64_t>(layer.steps) * P::step * sizeof(*a);
  const int64_t blocks = 1 + (rows - 1) / std::max<int64_t>(kBlockBytes / row_bytes, P::kRows);
  const int64_t panel_size = static_cast<int64_t>(layer.steps) * P::step * kPanel;
  team.each(blocks * layer.panel_count, kChunkProducts * blocks / (panel_size * rows), [&](int, int64_t item, int64_t end) {
    alignas(64) float tile[P::kRows * kPanel];
    for (; item < end; item++) {
      const int64_t block = item / layer.panel_count;
      const int64_t number = item % layer.panel_count;
      const auto *panel = layer.panel(number), *next = layer.panel((number + 1) % layer.panel_count);
      const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
      const int64_t strips = (count + P::kRows - 1) / P::kRows;
      for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t top = first + count * strip / strips, height = first + count * (strip + 1) / strips - top;
        const int ahead = count < kRowsToPrefetch || strip > 1 ? 0 : strips == 1 ? 2 : 1;
        kernels[ahead][height - 1](a + top * stride, stride, panel, layer.steps, tile, next + strip * panel_size / 2);
        for (int64_t row = top; row < top + height; row++) sink(row, number, tile + (row - top) * kPanel);
      }
    }
  });
}

}  // namespace arena
