// One op of the step at a time, on dense fp32 operands, so that each can be checked against the reference.
#pragma once

#include "step.h"

namespace arena {

// Dense [rows][width] to and from a buffer of [rows][stride].
template <class P, class To>
void spread(const float* dense, int64_t rows, int64_t width, To* buffer, int64_t stride) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < stride; i++) {
      const float value = i < width ? dense[row * width + i] : 0.f;
      if constexpr (std::is_same_v<To, float>)
        buffer[row * stride + i] = value;
      else
        buffer[row * stride + i] = P::to_act(value);
    }
}

template <class P, class From>
void gather(const From* buffer, int64_t rows, int64_t stride, float* dense, int64_t width) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < width; i++) {
      if constexpr (std::is_same_v<From, float>)
        dense[row * width + i] = buffer[row * stride + i];
      else
        dense[row * width + i] = P::from_act(buffer[row * stride + i]);
    }
}

// q between [row][head][dim] and the step's own [kv head][row][head of the group][dim].
template <class Move>
void each_q_head(const AnyDecoder& d, int64_t rows, Move move) {
  for (int64_t row = 0; row < rows; row++)
    for (int head = 0; head < d.t.heads; head++) {
      const int64_t kv_head = head / d.group_size, place = head % d.group_size;
      move((row * d.t.heads + head) * d.t.head_dim, ((kv_head * rows + row) * d.group_size + place) * d.t.head_dim);
    }
}

// x is the residual stream [row][hidden] where the op reads it; `other` is q, the attention's output, the MLP's product
// or K and V [row][2][kv head][dim]; `result` what kernels/spec.py says the op returns.
template <class P, class Matrix>
void run_op(const Decoder<P, Matrix>& d, const StepInput& in, Team& team, Workspace<P>& w, Op op, int layer, const float* x,
            const float* other, float* result) {
  const Traits& t = d.t;
  const Step<P, Matrix> step(d, in, team, w);
  step.embed();  // the angles, too
  if (x) spread<P>(x, in.rows, t.hidden, w.x, d.hidden_stride);
  if (op == kAttend)
    each_q_head(d, in.rows, [&](int64_t dense, int64_t own) {
      for (int i = 0; i < t.head_dim; i++) w.q[own + i] = P::to_act(other[dense + i]);
    });
  if (op == kProjectOutput) spread<P>(other, in.rows, d.heads_width, w.attended, d.heads_width);
  if (op == kProjectDown) spread<P>(other, in.rows, t.inner, w.product, d.inner_stride);
  switch (op) {
    case kEmbed: break;
    case kProjectQkv: step.project_qkv(layer); break;
    case kAttend: step.attend(layer); break;
    case kProjectOutput: step.project_output(layer); break;
    case kProjectGateUp: step.project_gate_up(layer); break;
    case kProjectDown: step.project_down(layer); break;
    case kProjectHead: step.project_head(); break;
    case kWriteKv: step.write_kv(layer, other); break;
  }
  switch (op) {
    case kProjectQkv:
      return each_q_head(d, in.rows, [&](int64_t dense, int64_t own) {
        for (int i = 0; i < t.head_dim; i++) result[dense + i] = P::from_act(w.q[own + i]);
      });
    case kAttend: return gather<P>(w.attended, in.rows, d.heads_width, result, d.heads_width);
    case kProjectGateUp: return gather<P>(w.product, in.rows, d.inner_stride, result, t.inner);
    case kProjectHead: case kWriteKv: return;  // into in.logits, into the pool
    default: return gather<P>(w.x, in.rows, d.hidden_stride, result, t.hidden);
  }
}

}  // namespace arena
