// The C interface that Python loads: open a team and a decoder, load its weights, run steps. No exception leaves it.
//
// Functions that can fail return null, or a message that stays valid until the same thread's next call.

#include <cstdio>
#include <mutex>

#include "check.h"
#include "draw.h"
#include "ops.h"
#include "step.h"

namespace arena {

struct Engine {
  explicit Engine(int threads) : team(threads) {}
  Team team;
  std::mutex mutex;           // the workspaces serve one step at a time
  std::vector<Drawer> drawers = std::vector<Drawer>(team.count());
  Workspace<Bf16> bf16_workspace;
  Workspace<Fp32> fp32_workspace;
  template <class Matrix>
  Workspace<Bf16>& workspace(const Decoder<Bf16, Matrix>&) { return bf16_workspace; }
  template <class Matrix>
  Workspace<Fp32>& workspace(const Decoder<Fp32, Matrix>&) { return fp32_workspace; }
};

template <class Body>
const char* guarded(Body body) {
  static thread_local char message[256];
  try {
    return body(message, sizeof message);
  } catch (const std::bad_alloc&) {
    return "the system gives no more memory";
  } catch (const std::exception& error) {
    std::snprintf(message, sizeof message, "%s", error.what());
    return message;
  }
}

// Calls body with a type, the decoder's own.
template <class Body>
void with_precision(const Traits& traits, Body body) {
  const auto with_matrices = [&](auto precision) {
    using P = decltype(precision);
#if ARENA_COMPACT
    if constexpr (std::is_same_v<P, Bf16>)
      if (traits.weights == kCompact) return body(static_cast<Decoder<P, CompactLinear>*>(nullptr));
#endif
    if (traits.weights == kInt8)
      body(static_cast<Decoder<P, Int8Linear<P>>*>(nullptr));
    else
      body(static_cast<Decoder<P, Linear<P>>*>(nullptr));
  };
  traits.is_bf16 ? with_matrices(Bf16()) : with_matrices(Fp32());
}

}  // namespace arena

using namespace arena;

// All else is hidden: two libraries for two instruction sets in one process must not share a symbol.
#pragma GCC visibility push(default)
extern "C" {

const char* arena_isa() { return kIsa; }

int arena_keeps_compact() { return ARENA_COMPACT; }

// The number of logits of a row that a step may write: the vocabulary, padded.
int64_t arena_logits_stride(const AnyDecoder* decoder) { return decoder->logits_stride; }

const char* arena_engine_open(int threads, Engine** result) {
  return guarded([&](char*, size_t) { return *result = new Engine(threads), nullptr; });
}

void arena_engine_close(Engine* engine) { delete engine; }

const char* arena_decoder_open(const Traits* traits, AnyDecoder** result) {
  return guarded([&](char*, size_t) {
    with_precision(*traits, [&](auto* kind) { *result = new std::remove_pointer_t<decltype(kind)>(*traits); });
    return nullptr;
  });
}

void arena_decoder_close(AnyDecoder* decoder) { delete decoder; }

const char* arena_decoder_load(AnyDecoder* decoder, int layer, int slot, const void* data) {
  return guarded([&](char*, size_t) { return decoder->load(layer, static_cast<Slot>(slot), data), nullptr; });
}

// An adapter of a decoder, which has to outlive it; see adapter.h for its operands.
const char* arena_adapter_open(const AnyDecoder* decoder, const int32_t* ranks, const float* scales, AnyAdapter** result) {
  return guarded([&](char*, size_t) {
    if (decoder->t.is_bf16)
      *result = new Adapter<Bf16>(*decoder, ranks, scales);
    else
      *result = new Adapter<Fp32>(*decoder, ranks, scales);
    return nullptr;
  });
}

void arena_adapter_close(AnyAdapter* adapter) { delete adapter; }

void arena_adapter_load(AnyAdapter* adapter, int layer, int target, const void* a, const void* b) {
  adapter->load(layer, static_cast<Target>(target), a, b);
}

const char* arena_forward(Engine* engine, AnyDecoder* decoder, const StepInput* input) {
  return guarded([&](char* message, size_t size) -> const char* {
    if (!check(*decoder, *input, message, size)) return message;
    std::lock_guard<std::mutex> lock(engine->mutex);
    const DenormalsOff denormals_off;
    with_precision(decoder->t, [&](auto* kind) {
      const auto& exact = *static_cast<decltype(kind)>(decoder);
      Step(exact, *input, engine->team, engine->workspace(exact)).forward();
    });
    return nullptr;
  });
}

// A token for each row of logits.
const char* arena_draw(Engine* engine, const DrawInput* input) {
  return guarded([&](char*, size_t) -> const char* {
    std::lock_guard<std::mutex> lock(engine->mutex);
    const DenormalsOff denormals_off;
    for (Drawer& drawer : engine->drawers) drawer.reserve(input->vocab);
    engine->team.each(input->rows, 1, [&](int thread, int64_t row, int64_t end) {
      for (; row < end; row++) input->tokens[row] = engine->drawers[thread].draw(*input, static_cast<int>(row));
    });
    return nullptr;
  });
}

// Runs one op alone; see ops.h for its operands.
const char* arena_op(Engine* engine, AnyDecoder* decoder, const StepInput* input, int op, int layer, const float* x,
                     const float* other, float* result) {
  return guarded([&](char* message, size_t size) -> const char* {
    if (!check(*decoder, *input, message, size)) return message;
    std::lock_guard<std::mutex> lock(engine->mutex);
    const DenormalsOff denormals_off;
    with_precision(decoder->t, [&](auto* kind) {
      const auto& exact = *static_cast<decltype(kind)>(decoder);
      run_op(exact, *input, engine->team, engine->workspace(exact), static_cast<Op>(op), layer, x, other, result);
    });
    return nullptr;
  });
}
}
#pragma GCC visibility pop
