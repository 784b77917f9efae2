// Runs the steps of a file and writes their logits: the kernels without Python, for emulated processors and sanitizers.
//
// The file is a row of arrays, each an int64 count of bytes and then the bytes; test_step_runner.py writes it.

#include <cstdio>
#include <cstdlib>

#include "../../kernels/cpu/kernels.cpp"

namespace {

FILE* input;

template <class T>
std::vector<T> read() {
  int64_t bytes;
  if (std::fread(&bytes, sizeof bytes, 1, input) != 1) std::exit(2);
  std::vector<T> values(bytes / sizeof(T));
  if (std::fread(values.data(), 1, bytes, input) != static_cast<size_t>(bytes)) std::exit(2);
  return values;
}

void require(const char* error) {
  if (!error) return;
  std::fprintf(stderr, "%s\n", error);
  std::exit(1);
}

}  // namespace

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]);
  input = std::fopen(arguments[2], "rb");
  FILE* output = std::fopen(arguments[3], "wb");

  Traits traits{};
  const auto numbers = read<int32_t>();
  std::memcpy(&traits.is_bf16, numbers.data(), numbers.size() * 4);
  const auto scales = read<float>();
  std::memcpy(&traits.norm_eps, scales.data(), scales.size() * 4);
  const auto window = read<int32_t>(), group = read<int32_t>(), group_layer = read<int32_t>(), rope = read<int32_t>();
  const auto rope_pairs = read<int32_t>();
  const auto inv_freq = read<float>(), rope_factor = read<float>();
  traits.window = window.data();
  traits.group = group.data();
  traits.group_layer = group_layer.data();
  traits.rope = rope.data();
  traits.rope_pairs = rope_pairs.data();
  traits.inv_freq = inv_freq.data();
  traits.rope_factor = rope_factor.data();

  AnyDecoder* decoder;
  Engine* engine;
  require(arena_decoder_open(&traits, &decoder));
  require(arena_engine_open(threads, &engine));
  for (auto place = read<int32_t>(); !place.empty(); place = read<int32_t>())
    require(arena_decoder_load(decoder, place[0], place[1], read<char>().data()));

  std::vector<AnyAdapter*> adapters;
  for (auto ranks = read<int32_t>(); !ranks.empty(); ranks = read<int32_t>()) {
    adapters.emplace_back();
    require(arena_adapter_open(decoder, ranks.data(), read<float>().data(), &adapters.back()));
    for (auto place = read<int32_t>(); !place.empty(); place = read<int32_t>()) {
      const auto a = read<char>(), b = read<char>();
      arena_adapter_load(adapters.back(), place[0], place[1], a.data(), b.data());
    }
  }

  auto pool = read<uint8_t>();
  const auto sizes = read<int64_t>();  // pages, page_bytes
  for (auto tokens = read<int32_t>(); !tokens.empty(); tokens = read<int32_t>()) {
    const auto positions = read<int32_t>(), starts = read<int32_t>(), contexts = read<int32_t>(), wanted = read<int32_t>();
    std::vector<std::vector<int32_t>> pages;
    std::vector<PageTable> tables;
    for (auto shape = read<int32_t>(); !shape.empty(); shape = read<int32_t>()) {
      pages.push_back(read<int32_t>());
      tables.push_back({pages.back().data(), shape[0], shape[1]});
    }
    const auto sequence_adapters = read<int32_t>();
    std::vector<float> logits(wanted.size() * decoder->logits_stride);
    const StepInput step{pool.data(), sizes[0], sizes[1], static_cast<int>(tokens.size()), static_cast<int>(contexts.size()),
                         static_cast<int>(wanted.size()), static_cast<int>(tables.size()), tokens.data(), positions.data(),
                         starts.data(), contexts.data(), wanted.data(), tables.data(), logits.data(), decoder->logits_stride,
                         adapters.data(), sequence_adapters.data(), static_cast<int64_t>(sequence_adapters.empty() ? 0 : adapters.size())};
    require(arena_forward(engine, decoder, &step));
    for (size_t row = 0; row < wanted.size(); row++)
      std::fwrite(logits.data() + row * decoder->logits_stride, sizeof(float), decoder->t.vocab, output);
  }
  std::fclose(output);
  for (AnyAdapter* adapter : adapters) arena_adapter_close(adapter);
  arena_engine_close(engine);
  arena_decoder_close(decoder);
  std::puts(arena_isa());
}
