// A decoder's weights in the layout of layout.h.
#pragma once

#include <vector>

#include "layout.h"
#include "linear.h"
#include "memory.h"

namespace arena {

// Both precisions behind one pointer for the C interface.
struct AnyDecoder {
  explicit AnyDecoder(const Traits& traits)
      : t(traits),
        windows(traits.window, traits.window + traits.layers),
        groups(traits.group, traits.group + traits.layers),
        group_layers(traits.group_layer, traits.group_layer + traits.layers),
        ropes(traits.rope, traits.rope + traits.layers),
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
    t.inv_freq = inv_freq.data();
    t.rope_factor = rope_factors.data();
    for (int32_t group : groups) group_count = std::max(group_count, group + 1);
  }
  virtual ~AnyDecoder() = default;

  // Packs one weight; `data` is dense and of the decoder's own type. Norms and biases are kept in fp32.
  virtual void load(int layer, Slot slot, const void* data) = 0;

  Traits t;
  const std::vector<int32_t> windows, groups, group_layers, ropes;
  const std::vector<float> inv_freq, rope_factors;
  const int group_size, heads_width, kv_width;
  const int64_t hidden_stride, inner_stride, qkv_stride, logits_stride;
  int32_t group_count = 0;
};

template <class P>
struct Decoder final : AnyDecoder {
  using Weight = typename P::Weight;

  struct Layer {
    float *attention_norm, *qkv_bias, *q_norm, *k_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
    Linear<P> qkv, o, gate_up, down;
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
      case kHead: return load_linear(head, source, t.vocab, t.hidden, Columns{0});
      case kAttentionNorm: return load_norm(layer->attention_norm, source, t.hidden);
      case kQ: return load_linear(layer->qkv, source, heads_width, t.hidden, Columns{0});
      case kK: return load_linear(layer->qkv, source, kv_width, t.hidden, Columns{heads_width});
      case kV: return load_linear(layer->qkv, source, kv_width, t.hidden, Columns{heads_width + kv_width});
      case kQBias: return load_vector(layer->qkv_bias, source, heads_width, 0);
      case kKBias: return load_vector(layer->qkv_bias + heads_width, source, kv_width, 0);
      case kVBias: return load_vector(layer->qkv_bias + heads_width + kv_width, source, kv_width, 0);
      case kQNorm: return load_norm(layer->q_norm, source, t.head_dim);
      case kKNorm: return load_norm(layer->k_norm, source, t.head_dim);
      case kO: return load_linear(layer->o, source, t.hidden, heads_width, Columns{0});
      case kPostAttentionNorm: return load_norm(layer->post_attention_norm, source, t.hidden);
      case kMlpNorm: return load_norm(layer->mlp_norm, source, t.hidden);
      case kGate: return load_linear(layer->gate_up, source, t.inner, t.hidden, Columns{0, true});
      case kUp: return load_linear(layer->gate_up, source, t.inner, t.hidden, Columns{kPanel / 2, true});
      case kDown: return load_linear(layer->down, source, t.hidden, t.inner, Columns{0});
      case kPostMlpNorm: return load_norm(layer->post_mlp_norm, source, t.hidden);
    }
  }

  // The embedding of a token, times embedding_scale, into x [hidden].
  void embed(int64_t token, float* x) const {
    if (!t.tied) {
      for (int i = 0; i < t.hidden; i++) x[i] = P::from_weight(embedding_[token * t.hidden + i]) * t.embedding_scale;
      return;
    }
    const Weight* column = head.panel(token / kPanel) + token % kPanel * P::step;
    for (int i = 0; i < t.hidden; i++)
      x[i] = P::from_weight(column[i / P::step * kPanel * P::step + i % P::step]) * t.embedding_scale;
  }

  std::vector<Layer> layers;
  float* final_norm;
  Linear<P> head;

 private:
  size_t lay_out(Pieces pieces) {
    const auto take_linear = [&](Linear<P>& linear, int64_t outputs, int64_t inputs) {
      linear.panel_count = outputs / kPanel;
      linear.steps = static_cast<int>(round_up(inputs, P::step) / P::step);
      Weight* panels;
      pieces.take(panels, outputs * linear.steps * P::step);
      linear.panels = panels;
    };
    for (Layer& layer : layers) {
      pieces.take(layer.attention_norm, hidden_stride);
      pieces.take(layer.qkv_bias, qkv_stride);
      pieces.take(layer.q_norm, t.head_dim);
      pieces.take(layer.k_norm, t.head_dim);
      take_linear(layer.qkv, qkv_stride, t.hidden);
      take_linear(layer.o, hidden_stride, heads_width);
      pieces.take(layer.post_attention_norm, hidden_stride);
      pieces.take(layer.mlp_norm, hidden_stride);
      take_linear(layer.gate_up, 2 * inner_stride, t.hidden);
      take_linear(layer.down, hidden_stride, inner_stride);
      pieces.take(layer.post_mlp_norm, hidden_stride);
    }
    pieces.take(final_norm, hidden_stride);
    take_linear(head, logits_stride, t.hidden);
    pieces.take(embedding_, t.tied ? 0 : static_cast<int64_t>(t.vocab) * t.hidden);
    return pieces.used();
  }

  // Which columns of the panels the outputs of a weight become.
  struct Columns {
    int64_t start;
    bool half = false;  // half of every panel
    int64_t operator()(int64_t output) const {
      constexpr int64_t kHalf = kPanel / 2;
      return half ? output / kHalf * kPanel + start + output % kHalf : start + output;
    }
  };

  void load_vector(float* target, const Weight* source, int64_t count, float offset) {
    for (int64_t i = 0; i < count; i++) target[i] = offset + P::from_weight(source[i]);
  }
  void load_norm(float* target, const Weight* source, int64_t count) { load_vector(target, source, count, t.norm_weight_offset); }

  void load_linear(const Linear<P>& linear, const Weight* source, int64_t outputs, int64_t inputs, Columns columns) {
    for (int64_t output = 0; output < outputs; output++) {
      const int64_t column = columns(output);
      Weight* target = const_cast<Weight*>(linear.panel(column / kPanel)) + column % kPanel * P::step;
      for (int64_t input = 0; input < inputs; input++)
        target[input / P::step * kPanel * P::step + input % P::step] = source[output * inputs + input];
    }
  }

  Mapping mapping_;
  Weight* embedding_;
};

}  // namespace arena
