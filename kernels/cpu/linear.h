// Linear layers over packed panels: rows of activations in, tiles of fp32 outputs handed to a sink.
//
// Work is cut into (block of rows) x (panel). A decode has one block of rows, so each thread streams its own run of panels
// from memory once; a prefill has many, so each thread keeps a block of activations in its L2 while the panels pass by.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "memory.h"
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

// Which columns of the panels the outputs of a weight become.
struct Columns {
  int64_t start;
  bool half = false;  // half of every panel
  int64_t operator()(int64_t output) const {
    constexpr int64_t kHalf = kPanel / 2;
    return half ? output / kHalf * kPanel + start + output % kHalf : start + output;
  }
};

template <class P>
struct Linear {
  using Weight = typename P::Weight;
  Weight* panels = nullptr;
  int64_t panel_count = 0, inputs = 0;
  int steps = 0;  // inputs / P::step, padded

  int64_t panel_size() const { return static_cast<int64_t>(steps) * P::step * kPanel; }
  const Weight* panel(int64_t number) const { return panels + number * panel_size(); }

  void lay_out(Pieces& pieces, int64_t outputs, int64_t count) {
    panel_count = round_up(outputs, kPanel) / kPanel;
    inputs = count;
    steps = static_cast<int>(round_up(inputs, P::step) / P::step);
    pieces.take(panels, panel_count * panel_size());
  }

  void load(const Weight* source, int64_t outputs, Columns columns) const {
    for (int64_t output = 0; output < outputs; output++) {
      Weight* target = place(columns(output));
      for (int64_t input = 0; input < inputs; input++) target[offset(input)] = source[output * inputs + input];
    }
  }

  // All weights of one output.
  void read(int64_t output, float* weights) const {
    for (int64_t input = 0; input < inputs; input++) weights[input] = P::from_weight(place(output)[offset(input)]);
  }

 private:
  Weight* place(int64_t column) const { return panels + column / kPanel * panel_size() + column % kPanel * P::step; }
  static int64_t offset(int64_t input) { return input / P::step * kPanel * P::step + input % P::step; }
};

// A tile of outputs: some rows times one panel. `ahead` halves of the panel `next`, from half number `half` on, are wanted
// in the L2 cache.
struct TileWork {
  int64_t top, panel, next;
  int height, ahead, half;
};

// Has all rows multiplied with all panels by multiply(work, tile [height][kPanel]), kRows rows at most at a time, and calls
// sink(row, panel, values [kPanel]) on the thread that computed them. A panel holds `panel_size` weights.
template <int kRows, class Multiply, class Sink>
void each_tile(Team& team, int64_t rows, int64_t row_bytes, int64_t panels, int64_t panel_size, Multiply multiply, Sink sink) {
  if (rows == 0) return;  // a prefill that wants no logits
  constexpr int64_t kBlockBytes = 192 * 1024;  // of activations, so that they, their outputs and a panel fit a common L2
  constexpr int64_t kChunkProducts = 16 * 1024;  // about a microsecond
  const int64_t blocks = 1 + (rows - 1) / std::max<int64_t>(kBlockBytes / row_bytes, kRows);
  team.each(blocks * panels, kChunkProducts * blocks / (panel_size * rows), [&](int, int64_t item, int64_t end) {
    alignas(64) float tile[kRows * kPanel];
    for (; item < end; item++) {
      const int64_t block = item / panels, panel = item % panels;
      const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
      const int64_t strips = (count + kRows - 1) / kRows;
      for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t top = first + count * strip / strips, bottom = first + count * (strip + 1) / strips;
        const int ahead = count < kRowsToPrefetch || strip > 1 ? 0 : strips == 1 ? 2 : 1;
        multiply(TileWork{top, panel, (panel + 1) % panels, static_cast<int>(bottom - top), ahead, static_cast<int>(strip)}, tile);
        for (int64_t row = top; row < bottom; row++) sink(row, panel, tile + (row - top) * kPanel);
      }
    }
  });
}

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

// The kernel of so many rows, and of so many halves of the next panel `ahead`.
template <class P>
MultiplyPanel<P> panel_kernel(int ahead, int rows) {
  constexpr auto kEachCount = std::make_integer_sequence<int, P::kRows>();
  static constexpr std::array<MultiplyPanel<P>, P::kRows> kernels[] = {
      panel_kernels<P, 0>(kEachCount), panel_kernels<P, 1>(kEachCount), panel_kernels<P, 2>(kEachCount)};
  return kernels[ahead][rows - 1];
}

// Calls sink(row, panel, values [kPanel]) for every row and panel, on the thread that computed them.
template <class P, class Sink>
void linear(Team& team, const typename P::Act* a, size_t stride, int64_t rows, const Linear<P>& layer, Sink sink) {
  const int64_t row_bytes = static_cast<int64_t>(layer.steps) * P::step * sizeof(*a), size = layer.panel_size();
  const auto multiply = [&](const TileWork& work, float* tile) {
    panel_kernel<P>(work.ahead, work.height)(a + work.top * stride, stride, layer.panel(work.panel), layer.steps, tile,
                                             layer.panel(work.next) + work.half * size / 2);
  };
  each_tile<P::kRows>(team, rows, row_bytes, layer.panel_count, size, multiply, sink);
}

}  // namespace arena
