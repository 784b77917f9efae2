// The layout of every buffer, and the structures that Python fills (kernels/cpu/binding.py mirrors them field by field).
//
// P is the precision: weights, KV and activations are bf16 or fp32; `step` is 2 for bf16 and 1 for fp32: how many
// neighbours along the summed dimension lie side by side, as the processor's BF16 dot product wants them.
// kPanel is the number of outputs computed together: two vectors of floats, 32 with AVX-512.
//
//   linear weights     [outputs / kPanel][inputs / step][kPanel][step]  one panel after another; outputs and inputs are
//                      padded with zeros. Of gate and up a panel holds half and half, so that the two values that are
//                      multiplied meet in one register tile.
//   int8 weights       [outputs / kPanel][inputs / 32]{int8 [32 / 4][kPanel][4], bf16 scale [kPanel]}   see int8.h
//   compact weights    [outputs / kPanel]{header, {codes, lower bytes} [inputs / 8]}   bf16 in 12 bits, see compact.h
//   embedding          the panels of the head where the two are tied, otherwise [vocab][hidden] row after row
//   K unit             [head_dim / step][16][step]   a vector is one dimension of 16 tokens: scores of 16 tokens at once
//   V unit             [16 / step][head_dim][step]   a vector is one token's dimensions: a chain over tokens
//   x, y, qkv          fp32 [row][stride]; strides are padded to whole panels, and the padding of x, y is always 0
//   q                  act [kv head][row][head of the group][head_dim]   rows of one K/V unit lie together
//   attended, product  act [row][stride]
//   cos_sin            fp32 [rope][row][2][head_dim / 2], of which the first rope_pairs of each half are used
//   logits             fp32 [wanted][logits_stride]
//   reduced            fp32 [row][reduced_stride]   what an adapter's `a` matrices leave of a row, for one product of a layer
// `act` is bf16 where the processor multiplies it, else fp32 that holds bf16 values.
#pragma once

#include <cstdint>

namespace arena {

constexpr int kBlockTokens = 16;

enum Activation : int32_t { kSilu, kGeluTanh };
enum Weights : int32_t { kPlain, kInt8, kCompact };  // how matrices are kept; the order is that of PRECISIONS in binding.py

// What Python knows of a decoder before its weights are read. All arrays have one entry a layer.
struct Traits {
  int32_t is_bf16, vocab, hidden, inner, heads, kv_heads, head_dim, layers, ropes;
  int32_t activation, qk_norm, post_norms, qkv_bias, tied, weights;
  float norm_eps, norm_weight_offset, embedding_scale, attention_scale, residual_scale, logit_scale;
  float attention_softcap, logit_softcap;  // 0 = none
  const int32_t* window;        // 0 = all tokens
  const int32_t* group;         // which of the step's page tables
  const int32_t* group_layer;   // number of the layer inside its group
  const int32_t* rope;          // which row of inv_freq
  const int32_t* rope_pairs;    // [ropes], of dimensions that turn
  const float* inv_freq;        // [ropes][head_dim / 2]
  const float* rope_factor;     // [ropes]
};

// One ragged step: see StepBatch in kernels/spec.py.
struct PageTable {
  const int32_t* pages;  // [sequence][blocks][pages_per_block]
  int32_t blocks, pages_per_block;
};

struct AnyAdapter;

struct StepInput {
  uint8_t* pool;
  int64_t pages, page_bytes;
  int32_t rows, sequences, wanted, groups;
  const int32_t *tokens, *positions, *query_starts, *context_lens, *logit_rows;
  const PageTable* tables;  // [groups]
  float* logits;
  int64_t logits_stride;
  const AnyAdapter* const* adapters;  // [adapter_count], of this decoder
  const int32_t* sequence_adapters;   // [sequence], -1 = none; read where there are adapters
  int64_t adapter_count;
};

// Weight slots of arena_load; the order is that of SLOTS in binding.py.
enum Slot : int32_t {
  kEmbedding, kFinalNorm, kHead,  // layer is ignored
  kAttentionNorm, kQ, kK, kV, kQBias, kKBias, kVBias, kQNorm, kKNorm, kO, kPostAttentionNorm,
  kMlpNorm, kGate, kUp, kDown, kPostMlpNorm,
};

// The fused ops, to be run one at a time by arena_op; the order is that of OPS in binding.py.
enum Op : int32_t { kEmbed, kProjectQkv, kAttend, kProjectOutput, kProjectGateUp, kProjectDown, kProjectHead, kWriteKv };

}  // namespace arena
