// Linear layers whose weights are bytes: half the memory to read, and twice the products an instruction.
//
// 32 neighbouring inputs are a group. Weights and activations of a group are whole numbers from -127 to 127 times a scale
// of their own, as in llama.cpp's Q8_0. The products of a group are summed as integers, exactly (32 * 127^2 < 2^24, so
// that the sum is a float, too), then scaled and added in fp32, group after group: a row's bits depend on nothing but the
// row, and all processors round the same values. kernels/reference.py defines what is rounded.
#pragma once

#include "linear.h"

namespace arena {

constexpr int kGroup = 32;
constexpr float kLeastOfGroup = 0x1p-100f;  // a group without a larger value counts as zeros
constexpr int64_t kGroupBytes = kPanel * (kGroup + sizeof(bf16));

// Writes the numbers of one group and returns their scale; with `rounded` the scale is a bf16. The scale is no number
// where a value is not finite, and so is all that is multiplied with it.
inline float quantise(const float (&group)[kGroup], bool rounded, int8_t* numbers) {
  vf largest = zero(), nothing = zero();
  for (int i = 0; i < kGroup; i += kLanes) {
    const vf value = load(group + i);
    largest = max(max(value, sub(zero(), value)), largest);
    nothing = add(nothing, sub(value, value));
  }
  const float most = max_of_lanes(largest), not_finite = sum_of_lanes(nothing);
  float scale = most > kLeastOfGroup ? most / 127 : 0.f;
  if (rounded) scale = from_bf16(to_bf16(scale));
  const float inverse = scale > 0 ? 1 / scale : 0.f;
  float whole[kGroup];
  for (int i = 0; i < kGroup; i += kLanes)
    store(whole + i, max(min(round(mul(load(group + i), set(inverse))), set(127.f)), set(-127.f)));
  for (int i = 0; i < kGroup; i++) numbers[i] = static_cast<int8_t>(whole[i]);
  return scale + not_finite;
}

// Rows of activations as bytes, groups padded with zeros.
struct Int8Rows {
  int8_t* numbers;  // [row][stride]
  float* scales;    // [row][stride / kGroup]
  int32_t* starts;  // [row][stride / kGroup], of sums: what the excess of all weights adds to them, less than 0
  int64_t stride;

  Int8Rows from(int64_t row) const {
    return {numbers + row * stride, scales + row * stride / kGroup, starts + row * stride / kGroup, stride};
  }

  template <class P>
  void set(int64_t row, const typename P::Act* a, int64_t inputs) const {
    const Int8Rows place = from(row);
    for (int64_t first = 0; first < inputs; first += kGroup) {
      float group[kGroup] = {};
      const int count = static_cast<int>(std::min<int64_t>(kGroup, inputs - first));
      if (count == kGroup)
        for (int i = 0; i < kGroup; i += kLanes) store(group + i, P::load_act(a + first + i));
      else
        for (int i = 0; i < count; i++) group[i] = P::from_act(a[first + i]);
      place.scales[first / kGroup] = quantise(group, false, place.numbers + first);
      int32_t sum = 0;
      for (int i = 0; i < kGroup; i++) sum += place.numbers[first + i];
      place.starts[first / kGroup] = -kWeightExcess * sum;
    }
  }
};

template <class P>
struct Int8Linear {
  uint8_t* panels = nullptr;
  int64_t panel_count = 0, inputs = 0;
  int groups = 0;

  int64_t panel_bytes() const { return groups * kGroupBytes; }
  const uint8_t* panel(int64_t number) const { return panels + number * panel_bytes(); }

  void lay_out(Pieces& pieces, int64_t outputs, int64_t count) {
    panel_count = round_up(outputs, kPanel) / kPanel;
    inputs = count;
    groups = static_cast<int>(round_up(inputs, kGroup) / kGroup);
    pieces.take(panels, panel_count * panel_bytes());
  }

  void load(const typename P::Weight* source, int64_t outputs, Columns columns) const {
    for (int64_t output = 0; output < outputs; output++)
      for (int64_t first = 0; first < inputs; first += kGroup) {
        float group[kGroup] = {};
        const int64_t count = std::min<int64_t>(kGroup, inputs - first);
        for (int64_t i = 0; i < count; i++) group[i] = P::from_weight(source[output * inputs + first + i]);
        int8_t numbers[kGroup];
        *scale(columns(output), first) = to_bf16(quantise(group, true, numbers));
        for (int i = 0; i < kGroup; i += 4) std::memcpy(numbers_of(columns(output), first + i), numbers + i, 4);
      }
  }

  // All weights of one output.
  void read(int64_t output, float* weights) const {
    for (int64_t input = 0; input < inputs; input++)
      weights[input] = *numbers_of(output, input) * from_bf16(*scale(output, input));
  }

 private:
  uint8_t* group(int64_t column, int64_t input) const {
    return panels + column / kPanel * panel_bytes() + input / kGroup * kGroupBytes;
  }
  int8_t* numbers_of(int64_t column, int64_t input) const {
    return reinterpret_cast<int8_t*>(group(column, input)) + (input % kGroup / 4 * kPanel + column % kPanel) * 4 + input % 4;
  }
  bf16* scale(int64_t column, int64_t input) const {
    return reinterpret_cast<bf16*>(group(column, input) + kPanel * kGroup) + column % kPanel;
  }
};

constexpr int kInt8Rows = kRegisters == 32 ? 6 : 2;  // rows of a register tile: integers and floats, beside one another

// Few rows hardly wait for arithmetic: then what is read some groups later comes into the L2 cache, beside what the processor
// foresees itself (a core read 20 GB/s with it and 16 without, measured; bf16, with less to do a byte, gains nothing).
constexpr int kGroupsAhead = 4;

// tile [R][kPanel] = a [R rows] times one panel. On the way kAhead halves of `next`, a panel, are brought into the L2 cache.
template <int kAhead, int R>
void multiply_int8_panel(const Int8Rows& a, const uint8_t* panel, int groups, float* tile, const uint8_t* next) {
  constexpr int kLines = static_cast<int>(kGroupBytes / 64), kNextLines = kLines * kAhead / 2;
  const int64_t stride = a.stride, group_stride = a.stride / kGroup;
  const int8_t* numbers = a.numbers;
  vf total[R][kPanelVectors];
  clear(total);
  for (int64_t g = 0; g < groups; g++, panel += kGroupBytes, numbers += kGroup) {
    ARENA_UNROLL
    for (int line = 0; line < kNextLines; line++) prefetch_l2(next + (g * kNextLines + line) * 64);
    ARENA_UNROLL
    for (int line = 0; line < (kAhead == 0 ? kLines : 0); line++) prefetch_l2(panel + kGroupsAhead * kGroupBytes + line * 64);
    vi sum[R][kPanelVectors];
    ARENA_UNROLL
    for (int r = 0; r < R; r++) {
      ARENA_UNROLL
      for (int c = 0; c < kPanelVectors; c++) sum[r][c] = set_whole(a.starts[r * group_stride + g]);
    }
    ARENA_UNROLL
    for (int i = 0; i < kGroup; i += 4) {
      Weights4 w[kPanelVectors];
      ARENA_UNROLL
      for (int c = 0; c < kPanelVectors; c++)
        w[c] = load_weights4(reinterpret_cast<const int8_t*>(panel) + i * kPanel + c * kLanes * 4);
      ARENA_UNROLL
      for (int r = 0; r < R; r++) {
        const Acts4 x = set_acts4(numbers + r * stride + i);
        ARENA_UNROLL
        for (int c = 0; c < kPanelVectors; c++) sum[r][c] = dot4(sum[r][c], w[c], x);
      }
    }
    const bf16* scales = reinterpret_cast<const bf16*>(panel + kPanel * kGroup);
    ARENA_UNROLL
    for (int c = 0; c < kPanelVectors; c++) {
      const vf scale = load_bf16(scales + c * kLanes);
      ARENA_UNROLL
      for (int r = 0; r < R; r++)
        total[r][c] = fma(to_floats(sum[r][c]), mul(set(a.scales[r * group_stride + g]), scale), total[r][c]);
    }
  }
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < kPanelVectors; c++) store(tile + r * kPanel + c * kLanes, total[r][c]);
  }
}

using MultiplyInt8Panel = void (*)(const Int8Rows&, const uint8_t*, int, float*, const uint8_t*);

template <int kAhead, int... R>
constexpr std::array<MultiplyInt8Panel, sizeof...(R)> int8_panel_kernels(std::integer_sequence<int, R...>) {
  return {multiply_int8_panel<kAhead, R + 1>...};
}

// As `linear` of linear.h; the activations become bytes in `buffer` first.
template <class P, class Sink>
void linear(Team& team, const typename P::Act* a, size_t stride, int64_t rows, const Int8Linear<P>& layer,
            const Int8Rows& buffer, Sink sink) {
  constexpr auto kEachCount = std::make_integer_sequence<int, kInt8Rows>();
  static constexpr std::array<MultiplyInt8Panel, kInt8Rows> kernels[] = {
      int8_panel_kernels<0>(kEachCount), int8_panel_kernels<1>(kEachCount), int8_panel_kernels<2>(kEachCount)};
  constexpr int64_t kChunkNumbers = 4 * 1024;  // about a microsecond
  team.each(rows, kChunkNumbers / layer.inputs, [&](int, int64_t row, int64_t end) {
    for (; row < end; row++) buffer.set<P>(row, a + row * stride, layer.inputs);
  });
  const int64_t row_bytes = layer.groups * kGroup, size = layer.panel_bytes();
  const auto multiply = [&](const TileWork& work, float* tile) {
    kernels[work.ahead][work.height - 1](buffer.from(work.top), layer.panel(work.panel), layer.groups, tile,
                                         layer.panel(work.next) + work.half * size / 2);
  };
  each_tile<kInt8Rows>(team, rows, row_bytes, layer.panel_count, size, multiply, sink);
}

}  // namespace arena
