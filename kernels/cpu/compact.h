// Linear layers of bf16 weights kept in 12 bits each, to the bit: three quarters of the memory to read for a token.
//
// The exponents of trained weights carry some 2.6 of their 8 bits (DFloat11, arXiv 2504.11651, section 2.2). The upper byte
// of a bf16 is its sign and all but the last bit of its exponent. A panel has a table of 16 upper bytes, its most frequent
// ones, and of every weight the lower byte and 4 bits that say which of the table is the upper. A weight that the table
// does not serve, some 3 of 10,000, is zero there, and its product is added at the end from a list: so the inner loop has
// no branch. A panel with so many of them that the list would take more than is saved is kept as it is.
//
// A panel is a CompactHeader, its list, padding to 64 bytes, then for each four of its steps and each vector c of theirs
// {codes [64], of the first two steps in the low halves; lower bytes [2][64], of two steps each}. Bytes lie so that
// interleaving lower and upper, in lanes of 16, gives the vector of the first of two steps and that of the second.
#pragma once

#include <numeric>
#include <vector>

#include "linear.h"

namespace arena {

struct CompactLinear;

#if ARENA_BF16_DOT
#define ARENA_COMPACT 1

constexpr int kLine = 64;  // bytes of the cache, and of a vector
constexpr int kFourSteps = 3 * kLine * kPanelVectors;
constexpr int kAsItIs = -1;

struct CompactHeader {
  uint8_t table[16];
  int32_t others, body;  // how many the list has, or kAsItIs; where the body begins, in bytes
};

// A weight that is not in the body.
struct Other {
  int32_t input;
  uint16_t column;
  bf16 weight;
};

struct CompactPanel {
  const uint8_t* bytes;

  const CompactHeader& header() const { return *reinterpret_cast<const CompactHeader*>(bytes); }
  const Other* others() const { return reinterpret_cast<const Other*>(bytes + sizeof(CompactHeader)); }
  const uint8_t* body() const { return bytes + header().body; }
};

// Vector c of two of four steps, the first two or (i = 1) the last, from the body of a panel.
ARENA_INLINE void read_two_steps(const uint8_t* four_steps, int c, int i, __m512i table, Pairs& first, Pairs& second) {
  const uint8_t* place = four_steps + c * 3 * kLine;
  const __m512i both = _mm512_loadu_si512(place), lower = _mm512_loadu_si512(place + (1 + i) * kLine);
  const __m512i codes = _mm512_and_si512(i == 0 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(0xf));
  const __m512i upper = _mm512_shuffle_epi8(table, codes);
  first = (Pairs)_mm512_unpacklo_epi8(lower, upper);
  second = (Pairs)_mm512_unpackhi_epi8(lower, upper);
}

ARENA_INLINE __m512i table_of(const CompactPanel& panel) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.header().table)));
}

// Packs panels of Linear<Bf16>, whose steps are a multiple of four.
class CompactPacker {
 public:
  CompactPacker(int steps, Shelf& shelf) : steps_(steps), shelf_(shelf) {}

  CompactPanel pack(const bf16* panel) {
    const int64_t size = int64_t{steps_} * 2 * kPanel;
    CompactHeader header{};
    int8_t code[256];
    choose_codes(panel, size, header, code);
    others_.clear();
    body_.assign(steps_ / 4 * kFourSteps, 0);
    uint8_t* place = body_.data();
    for (int step = 0; step < steps_; step += 4)
      for (int c = 0; c < kPanelVectors; c++, place += 3 * kLine)
        for (int byte = 0; byte < 2 * kLine; byte++) {
          const int i = byte / kLine, number = byte % kLine / 16 * 8 + byte % 8, at = step + 2 * i + byte / 8 % 2;
          bf16 weight = panel[at * 2 * kPanel + c * 2 * kLanes + number];
          if (code[weight >> 8] < 0) {
            others_.push_back({at * 2 + number % 2, static_cast<uint16_t>(c * kLanes + number / 2), weight});
            weight = 0;
          }
          place[byte % kLine] |= code[weight >> 8] << 4 * i;
          place[kLine + byte] = static_cast<uint8_t>(weight);
        }
    if (static_cast<int64_t>(others_.size()) > size / kWeightsAnOther) {
      header.others = kAsItIs;
      return place_on_shelf(header, nullptr, 0, panel, size * sizeof *panel);
    }
    header.others = static_cast<int32_t>(others_.size());
    return place_on_shelf(header, others_.data(), others_.size() * sizeof(Other), body_.data(), body_.size());
  }

 private:
  static constexpr int kWeightsAnOther = 128;  // the list then takes an eighth of what the codes save

  // Zero is always in the table: weights that are not take its place.
  static void choose_codes(const bf16* panel, int64_t size, CompactHeader& header, int8_t (&code)[256]) {
    int64_t count[256] = {};
    for (int64_t i = 0; i < size; i++) count[panel[i] >> 8]++;
    count[0] = size + 1;
    uint8_t order[256];
    std::iota(order, order + 256, 0);
    std::stable_sort(order, order + 256, [&](int a, int b) { return count[a] > count[b]; });
    std::copy_n(order, sizeof header.table, header.table);
    std::fill_n(code, 256, -1);
    for (size_t i = 0; i < sizeof header.table; i++) code[order[i]] = static_cast<int8_t>(i);
  }

  CompactPanel place_on_shelf(CompactHeader header, const void* others, size_t others_bytes, const void* body,
                              size_t body_bytes) const {
    header.body = static_cast<int32_t>(round_up(sizeof header + others_bytes, kLine));
    uint8_t* bytes = shelf_.take(header.body + body_bytes);
    std::memcpy(bytes, &header, sizeof header);
    if (others_bytes) std::memcpy(bytes + sizeof header, others, others_bytes);
    std::memcpy(bytes + header.body, body, body_bytes);
    return {bytes};
  }

  const int steps_;
  Shelf& shelf_;
  std::vector<Other> others_;  // of the panel at hand, as is the body
  std::vector<uint8_t> body_;
};

struct CompactLinear {
  std::vector<CompactPanel> panels;
  int64_t inputs = 0;
  int steps = 0;  // inputs / 2, padded to a multiple of four

  int64_t panel_size() const { return int64_t{steps} * 2 * kPanel; }

  void lay_out(Pieces&, int64_t outputs, int64_t count) {
    panels.resize(round_up(outputs, kPanel) / kPanel);
    inputs = count;
    steps = static_cast<int>(round_up(inputs, 8) / 2);
    outputs_ = missing_ = outputs;
  }

  // Panels are packed one by one where all outputs come at once, else when the last have come.
  void load(const bf16* source, int64_t outputs, Columns columns, Shelf& shelf) {
    CompactPacker packer(steps, shelf);
    missing_ -= outputs;
    if (outputs < outputs_) {
      const Linear<Bf16> all = plain(panels.size());
      all.load(source, outputs, columns);
      if (missing_ > 0) return;
      for (size_t i = 0; i < panels.size(); i++) panels[i] = packer.pack(all.panel(i));
    } else {
      const Linear<Bf16> one = plain(1);
      for (CompactPanel& panel : panels) {
        std::fill_n(one.panels, panel_size(), 0);
        one.load(source, std::min<int64_t>(outputs, kPanel), columns);
        panel = packer.pack(one.panels);
        source += kPanel * inputs;
        outputs -= kPanel;
      }
    }
    plain_.release();
  }

  // All weights of one output.
  void read(int64_t output, float* weights) const {
    const CompactPanel panel = panels[output / kPanel];
    const int column = static_cast<int>(output % kPanel), c = column / kLanes, lane = column % kLanes;
    if (panel.header().others == kAsItIs) {
      const bf16* body = reinterpret_cast<const bf16*>(panel.body());
      for (int64_t i = 0; i < inputs; i++) weights[i] = from_bf16(body[i / 2 * 2 * kPanel + column * 2 + i % 2]);
      return;
    }
    const __m512i table = table_of(panel);
    for (int64_t input = 0; input < inputs; input += 4) {
      Pairs two[2];
      read_two_steps(panel.body() + input / 8 * kFourSteps, c, input / 4 % 2, table, two[0], two[1]);
      bf16 values[2][kLanes][2];
      std::memcpy(values, two, sizeof values);
      for (int i = 0; i < 4 && input + i < inputs; i++) weights[input + i] = from_bf16(values[i / 2][lane][i % 2]);
    }
    for (int i = 0; i < panel.header().others; i++)
      if (const Other& other = panel.others()[i]; other.column == column) weights[other.input] = from_bf16(other.weight);
  }

 private:
  // So many panels, zero at first, for weights to wait in.
  Linear<Bf16> plain(int64_t count) {
    Linear<Bf16> result;
    result.panels = reinterpret_cast<bf16*>(plain_.grow(count * panel_size() * sizeof(bf16)));
    result.panel_count = count;
    result.inputs = inputs;
    result.steps = steps;
    return result;
  }

  int64_t outputs_ = 0, missing_ = 0;  // of which have not come yet
  Mapping plain_;                      // given back whole, where the heap would keep it
};

// Rows of a register tile: of both vectors of a panel, and of one after the other; six registers more are for the weights.
constexpr int kRowsOfBoth = 8, kCompactRows = 16;

// Vectors kFirst .. kFirst + kCount - 1 of tile [R][kPanel] = a [R rows] times the body of a panel. On the way as much of the
// panel `next` is brought into the L2 cache.
template <int kFirst, int kCount, int R>
ARENA_INLINE void multiply_vectors(const bf16* a, size_t stride, const CompactPanel& panel, int steps, float* tile,
                                   const uint8_t* next) {
  vf acc[R][kCount];
  clear(acc);
  const __m512i table = table_of(panel);
  const uint8_t *body = panel.body(), *end = body + steps / 4 * kFourSteps;
  for (; body < end; body += kFourSteps, next += kFourSteps, a += 8) {
    ARENA_UNROLL
    for (int line = 3 * kFirst; line < (R < kRowsToPrefetch ? 0 : 3 * (kFirst + kCount)); line++)
      prefetch_l2(next + line * kLine);
    ARENA_UNROLL
    for (int i = 0; i < 2; i++) {
      ARENA_UNROLL
      for (int c = 0; c < kCount; c++) {
        Pairs first, second;
        read_two_steps(body, kFirst + c, i, table, first, second);
        ARENA_UNROLL
        for (int r = 0; r < R; r++) acc[r][c] = dot_pairs(acc[r][c], first, set_pair(a + r * stride + i * 4));
        ARENA_UNROLL
        for (int r = 0; r < R; r++) acc[r][c] = dot_pairs(acc[r][c], second, set_pair(a + r * stride + i * 4 + 2));
      }
    }
  }
  ARENA_UNROLL
  for (int r = 0; r < R; r++) {
    ARENA_UNROLL
    for (int c = 0; c < kCount; c++) store(tile + r * kPanel + (kFirst + c) * kLanes, acc[r][c]);
  }
}

template <int R>
void multiply_compact_panel(const bf16* a, size_t stride, const CompactPanel& panel, int steps, float* tile,
                            const uint8_t* next) {
  if constexpr (R <= kRowsOfBoth) {
    multiply_vectors<0, 2, R>(a, stride, panel, steps, tile, next);
  } else {
    multiply_vectors<0, 1, R>(a, stride, panel, steps, tile, next);
    multiply_vectors<1, 1, R>(a, stride, panel, steps, tile, next);
  }
  for (int i = 0; i < panel.header().others; i++) {
    const Other& other = panel.others()[i];
    for (int r = 0; r < R; r++) {
      float& sum = tile[r * kPanel + other.column];
      sum = std::fma(from_bf16(other.weight), from_bf16(a[r * stride + other.input]), sum);
    }
  }
}

using MultiplyCompactPanel = void (*)(const bf16*, size_t, const CompactPanel&, int, float*, const uint8_t*);

template <int... R>
constexpr std::array<MultiplyCompactPanel, sizeof...(R)> compact_panel_kernels(std::integer_sequence<int, R...>) {
  return {multiply_compact_panel<R + 1>...};
}

// As `linear` of linear.h.
template <class Sink>
void linear(Team& team, const bf16* a, size_t stride, int64_t rows, const CompactLinear& layer, Sink sink) {
  static constexpr auto kKernels = compact_panel_kernels(std::make_integer_sequence<int, kCompactRows>());
  const auto multiply = [&](const TileWork& work, float* tile) {
    const CompactPanel& panel = layer.panels[work.panel];
    const bf16* first = a + work.top * stride;
    if (panel.header().others != kAsItIs)
      return kKernels[work.height - 1](first, stride, panel, layer.steps, tile, layer.panels[work.next].bytes);
    const bf16* body = reinterpret_cast<const bf16*>(panel.body());
    for (int row = 0; row < work.height; row += Bf16::kRows)
      panel_kernel<Bf16>(0, std::min(work.height - row, Bf16::kRows))(first + row * stride, stride, body, layer.steps,
                                                                      tile + row * kPanel, body);
  };
  const int64_t row_bytes = layer.steps * 2 * sizeof *a, panels = layer.panels.size();
  each_tile<kCompactRows>(team, rows, row_bytes, panels, layer.panel_size(), multiply, sink);
}

#else
#define ARENA_COMPACT 0
#endif

}  // namespace arena
