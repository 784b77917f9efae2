// Low-rank adapters (LoRA, arXiv 2106.09685): what rows of an adapted model add to the layers of the one packed base.
//
// A step may have rows of several adapters, and of none. Before a layer all rows of one adapter, which lie side by side,
// meet its `a` matrices together, by the inner loop of every linear layer; the few floats that are left of a row meet `b`
// where the layer's own tile of that row is at hand (the two halves of Punica's SGMV, arXiv 2310.18547, section 4). Either
// is one chain of additions for a value, so a row's bits depend on nothing but the row.
#pragma once

#include <vector>

#include "decoder.h"

namespace arena {

// The products of a layer, and the matrices that share each: an adapter may add to some of them.
enum Product : int32_t { kQkvProduct, kOProduct, kGateUpProduct, kDownProduct, kProducts };
enum Target : int32_t { kToQ, kToK, kToV, kToO, kToGate, kToUp, kToDown, kTargets };  // order of ADAPTABLE in spec.py

// What one adapter adds to one product of a layer.
template <class P>
struct LowRank {
  using Weight = typename P::Weight;

  // A vector of outputs adds b [rank][kLanes], times the floats of the row from number `first` on.
  struct Strip {
    const Weight* b;
    int32_t first, rank;
  };

  Linear<P> a;             // of all targets, one below the other
  float* scales = nullptr;  // [a's outputs, padded]
  Strip* strips = nullptr;  // [vector of outputs]

  void add_to(float* values, int64_t panel, const float* reduced) const {
    if (a.panel_count == 0) return;  // nothing is added to this product, and there are no strips
    for (int c = 0; c < kPanelVectors; c++) {
      const Strip& strip = strips[panel * kPanelVectors + c];
      if (strip.rank == 0) continue;
      vf sum = zero();
      for (int i = 0; i < strip.rank; i++)
        sum = fma(set(reduced[strip.first + i]), load_weights(strip.b + i * kLanes), sum);
      store(values + c * kLanes, add(load(values + c * kLanes), sum));
    }
  }

 private:
  static ARENA_INLINE vf load_weights(const float* p) { return load(p); }
  static ARENA_INLINE vf load_weights(const bf16* p) { return load_bf16(p); }
};

// Both precisions behind one pointer for the C interface.
struct AnyAdapter {
  explicit AnyAdapter(const AnyDecoder& decoder) : decoder(decoder) {}
  virtual ~AnyAdapter() = default;

  // Packs what is added to one matrix: `a` [rank][inputs] and `b` [outputs][rank], dense and of the decoder's type, P.
  virtual void load(int layer, Target target, const void* a, const void* b) = 0;

  const AnyDecoder& decoder;  // whose rows it may be given
};

template <class P>
struct Adapter final : AnyAdapter {
  using Weight = typename P::Weight;

  // ranks, scales [layer][kTargets]; rank 0 where nothing is added
  Adapter(const AnyDecoder& decoder, const int32_t* ranks, const float* scales)
      : AnyAdapter(decoder), ranks_(ranks, ranks + decoder.t.layers * kTargets), parts_(decoder.t.layers * kProducts) {
    lay_out(Pieces(mapping_.grow(lay_out(Pieces(nullptr)))));
    for (int layer = 0; layer < decoder.t.layers; layer++)
      for (int target = 0; target < kTargets; target++)
        std::fill_n(part(layer, place_of(target).product).scales + first_of(layer, target), rank(layer, target),
                    scales[layer * kTargets + target]);
  }

  const LowRank<P>& of(int layer, Product product) const { return parts_[layer * kProducts + product]; }

  // The most panels of any `a`.
  int64_t panels() const { return panels_; }

  void load(int layer, Target target, const void* a, const void* b) override {
    const Place place = place_of(target);
    const LowRank<P>& low = part(layer, place.product);
    const int rank = this->rank(layer, target), first = first_of(layer, target);
    low.a.load(static_cast<const Weight*>(a), rank, Columns{first});
    const Weight* source = static_cast<const Weight*>(b);
    Weight* packed = b_[layer * kTargets + target];
    for (int64_t output = 0; output < place.outputs; output++) {
      Weight* strip = packed + output / kLanes * rank * kLanes;
      for (int i = 0; i < rank; i++) strip[i * kLanes + output % kLanes] = source[output * rank + i];
      low.strips[place.columns(output) / kLanes] = {strip, first, rank};
    }
  }

 private:
  // Where what a target's matrix gives lies in its product. Each begins with a vector of its own.
  struct Place {
    Product product;
    int64_t outputs;
    Columns columns;
  };
  Place place_of(int target) const {
    const AnyDecoder& d = decoder;
    switch (target) {
      case kToQ: return {kQkvProduct, d.heads_width, {0}};
      case kToK: return {kQkvProduct, d.kv_width, {d.heads_width}};
      case kToV: return {kQkvProduct, d.kv_width, {d.heads_width + d.kv_width}};
      case kToO: return {kOProduct, d.t.hidden, {0}};
      case kToGate: return {kGateUpProduct, d.t.inner, {0, true}};
      case kToUp: return {kGateUpProduct, d.t.inner, {kPanel / 2, true}};
      default: return {kDownProduct, d.t.hidden, {0}};
    }
  }
  static_assert(kPanel / 2 == kLanes, "half a panel is a vector");

  int rank(int layer, int target) const { return ranks_[layer * kTargets + target]; }

  // The number of a target's first output of `a`: those before it in the same product come first.
  int first_of(int layer, int target) const {
    int first = 0;
    for (int other = 0; other < target; other++)
      if (place_of(other).product == place_of(target).product) first += rank(layer, other);
    return first;
  }

  LowRank<P>& part(int layer, Product product) { return parts_[layer * kProducts + product]; }

  size_t lay_out(Pieces pieces) {
    const AnyDecoder& d = decoder;
    const int64_t inputs[kProducts] = {d.t.hidden, d.heads_width, d.t.hidden, d.t.inner};
    const int64_t outputs[kProducts] = {d.qkv_stride, d.hidden_stride, 2 * d.inner_stride, d.hidden_stride};
    b_.resize(d.t.layers * kTargets);
    for (int layer = 0; layer < d.t.layers; layer++) {
      int64_t total[kProducts] = {};
      for (int target = 0; target < kTargets; target++) total[place_of(target).product] += rank(layer, target);
      for (int product = 0; product < kProducts; product++) {
        LowRank<P>& low = part(layer, static_cast<Product>(product));
        const int64_t columns = round_up(total[product], kPanel);
        low.a.lay_out(pieces, columns, inputs[product]);
        pieces.take(low.scales, columns);
        pieces.take(low.strips, columns ? outputs[product] / kLanes : 0);
        panels_ = std::max(panels_, low.a.panel_count);
      }
      for (int target = 0; target < kTargets; target++)
        pieces.take(b_[layer * kTargets + target], round_up(place_of(target).outputs, kLanes) * rank(layer, target));
    }
    return pieces.used();
  }

  const std::vector<int32_t> ranks_;
  std::vector<LowRank<P>> parts_;  // [layer][kProducts]
  std::vector<Weight*> b_;         // [layer][kTargets]
  int64_t panels_ = 0;
  Mapping mapping_;
};

}  // namespace arena
