// A decoder's weights in the layout of layout.h.
#pragma once

#include <vector>

#include "compact.h"
#include "int8.h"
#include "layout.h"
#include "memory.h"

namespace arena {

// All precisions behind one pointer for the C interface.
struct AnyDecoder {
  explicit AnyDecoder(const Traits& traits)
      : t(traits),
        windows(traits.window, traits.window + traits.layers),
        groups(traits.group, traits.group + traits.layers),
        group_layers(traits.group_layer, traits.group_layer + traits.layers),
        ropes(traits.rope, traits.rope + traits.layers),
        rope_pairs(traits.rope_pairs, traits.rope_pairs + traits.ropes),
        inv_freq(traits.inv_freq, traits.inv_freq + traits.ropes * traits.head_dim / 2),
        rope_factors(traits.rope_factor, traits.rope_factor + traits.ropes),
        group_size(traits.heads / traits.kv_heads),
        heads_width(traits.heads * traits.head_dim),
        kv_width(traits.kv_heads * traits.head_dim),
        hidden_stride(round_up(traits.hidden, kPanel)),
        inner_stride(round_up(traits.inner, kPanel / 2)),
        qkv_stride(round_up(heads_width + 2 * kv_width, kPanel)),
        logits_stride(round_up(traits.vocab, kPanel)) {
    t.window = windows.data();
    t.group = groups.data();
    t.group_layer = group_layers.data();
    t.rope = ropes.data();
    t.rope_pairs = rope_pairs.data();
    t.inv_freq = inv_freq.data();
    t.rope_factor = rope_factors.data();
    for (int32_t group : groups) group_count = std::max(group_count, group + 1);
  }
  virtual ~AnyDecoder() = default;

  // Packs one weight; `data` is dense and of the decoder's own type, P. Norms and biases are kept in fp32.
  virtual void load(int layer, Slot slot, const void* data) = 0;

  Traits t;
  const std::vector<int32_t> windows, groups, group_layers, ropes, rope_pairs;
  const std::vector<float> inv_freq, rope_factors;
  const int group_size, heads_width, kv_width;
  const int64_t hidden_stride, inner_stride, qkv_stride, logits_stride;
  int32_t group_count = 0;
};

// `Matrix` is Linear<P>, Int8Linear<P> or, of bf16, CompactLinear.
template <class P, class Matrix>
struct Decoder final : AnyDecoder {
  using Weight = typename P::Weight;

  struct Layer {
    float *attention_norm, *qkv_bias, *q_norm, *k_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
    Matrix qkv, o, gate_up, down;
  };

  explicit Decoder(const Traits& traits) : AnyDecoder(traits), layers(traits.layers) {
    lay_out(Pieces(mapping_.grow(lay_out(Pieces(nullptr)))));
  }

  void load(int number, Slot slot, const void* data) override {
    const Weight* source = static_cast<const Weight*>(data);
    Layer* layer = slot > kHead ? &layers[number] : nullptr;
    switch (slot) {
      case kEmbedding: return t.tied ? void() : void(std::copy_n(source, static_cast<int64_t>(t.vocab) * t.hidden, embedding_));
      case kFinalNorm: return load_norm(final_norm, source, t.hidden);
      case kHead: return load_matrix(head, source, t.vocab, Columns{0});
      case kAttentionNorm: return load_norm(layer->attention_norm, source, t.hidden);
      case kQ: return load_matrix(layer->qkv, source, heads_width, Columns{0});
      case kK: return load_matrix(layer->qkv, source, kv_width, Columns{heads_width});
      case kV: return load_matrix(layer->qkv, source, kv_width, Columns{heads_width + kv_width});
      case kQBias: return load_vector(layer->qkv_bias, source, heads_width, 0);
      case kKBias: return load_vector(layer->qkv_bias + heads_width, source, kv_width, 0);
      case kVBias: return load_vector(layer->qkv_bias + heads_width + kv_width, source, kv_width, 0);
      case kQNorm: return load_norm(layer->q_norm, source, t.head_dim);
      case kKNorm: return load_norm(layer->k_norm, source, t.head_dim);
      case kO: return load_matrix(layer->o, source, t.hidden, Columns{0});
      case kPostAttentionNorm: return load_norm(layer->post_attention_norm, source, t.hidden);
      case kMlpNorm: return load_norm(layer->mlp_norm, source, t.hidden);
      case kGate: return load_matrix(layer->gate_up, source, t.inner, Columns{0, true});
      case kUp: return load_matrix(layer->gate_up, source, t.inner, Columns{kPanel / 2, true});
      case kDown: return load_matrix(layer->down, source, t.hidden, Columns{0});
      case kPostMlpNorm: return load_norm(layer->post_mlp_norm, source, t.hidden);
    }
  }

  // The embedding of a token, times embedding_scale, into x [hidden].
  void embed(int64_t token, float* x) const {
    if (t.tied)
      head.read(token, x);
    else
      for (int i = 0; i < t.hidden; i++) x[i] = P::from_weight(embedding_[token * t.hidden + i]);
    for (int i = 0; i < t.hidden; i++) x[i] *= t.embedding_scale;
  }

  std::vector<Layer> layers;
  float* final_norm;
  Matrix head;

 private:
  size_t lay_out(Pieces pieces) {
    for (Layer& layer : layers) {
      pieces.take(layer.attention_norm, hidden_stride);
      pieces.take(layer.qkv_bias, qkv_stride);
      pieces.take(layer.q_norm, t.head_dim);
      pieces.take(layer.k_norm, t.head_dim);
      layer.qkv.lay_out(pieces, heads_width + 2 * kv_width, t.hidden);
      layer.o.lay_out(pieces, t.hidden, heads_width);
      pieces.take(layer.post_attention_norm, hidden_stride);
      pieces.take(layer.mlp_norm, hidden_stride);
      layer.gate_up.lay_out(pieces, 2 * t.inner, t.hidden);
      layer.down.lay_out(pieces, t.hidden, t.inner);
      pieces.take(layer.post_mlp_norm, hidden_stride);
    }
    pieces.take(final_norm, hidden_stride);
    head.lay_out(pieces, t.vocab, t.hidden);
    pieces.take(embedding_, t.tied ? 0 : static_cast<int64_t>(t.vocab) * t.hidden);
    return pieces.used();
  }

  void load_matrix(Matrix& matrix, const Weight* source, int64_t outputs, Columns columns) {
    if constexpr (std::is_same_v<Matrix, CompactLinear>)
      matrix.load(source, outputs, columns, shelf_);
    else
      matrix.load(source, outputs, columns);
  }

  void load_vector(float* target, const Weight* source, int64_t count, float offset) {
    for (int64_t i = 0; i < count; i++) target[i] = offset + P::from_weight(source[i]);
  }
  void load_norm(float* target, const Weight* source, int64_t count) { load_vector(target, source, count, t.norm_weight_offset); }

  Mapping mapping_;
  Shelf shelf_;  // of compact matrices
  Weight* embedding_;
};

}  // namespace arena
