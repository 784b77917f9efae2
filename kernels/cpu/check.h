// Is a step's input sound? Everything that becomes an address is looked at before the first thread starts.
#pragma once

#include <cstdio>

#include "adapter.h"

namespace arena {

// False with a message where a number of `in` would make the step read or write where it must not.
inline bool check(const AnyDecoder& d, const StepInput& in, char* message, size_t size) {
  const auto refuse = [&](const char* format, auto... numbers) {
    std::snprintf(message, size, format, numbers...);
    return false;
  };
  const int64_t unit_bytes = static_cast<int64_t>(kBlockTokens) * d.t.head_dim * (d.t.is_bf16 ? 2 : 4);
  const int64_t units_per_page = in.page_bytes / unit_bytes;
  if (units_per_page == 0) return refuse("a page has %lld bytes, a unit of this decoder %lld", (long long)in.page_bytes, (long long)unit_bytes);
  if (in.groups != d.group_count) return refuse("%d page tables were given, the decoder has %d layer groups", in.groups, d.group_count);
  if (in.query_starts[0] != 0 || in.query_starts[in.sequences] != in.rows)
    return refuse("query_starts must run from 0 to %d rows, not from %d to %d", in.rows, in.query_starts[0], in.query_starts[in.sequences]);
  for (int row = 0; row < in.rows; row++)
    if (in.tokens[row] < 0 || in.tokens[row] >= d.t.vocab) return refuse("row %d has token %d, the vocabulary %d", row, in.tokens[row], d.t.vocab);
  for (int i = 0; i < in.wanted; i++)
    if (in.logit_rows[i] < 0 || in.logit_rows[i] >= in.rows) return refuse("logits are wanted of row %d of %d", in.logit_rows[i], in.rows);
  for (int i = 0; i < in.adapter_count; i++)
    if (&in.adapters[i]->decoder != &d) return refuse("adapter %d is of another decoder", i);
  for (int sequence = 0; sequence < in.sequences && in.adapter_count; sequence++)
    if (in.sequence_adapters[sequence] < -1 || in.sequence_adapters[sequence] >= in.adapter_count)
      return refuse("sequence %d has adapter %d of %lld", sequence, in.sequence_adapters[sequence], (long long)in.adapter_count);
  for (int sequence = 0; sequence < in.sequences; sequence++) {
    const int first = in.query_starts[sequence], end = in.query_starts[sequence + 1], context = in.context_lens[sequence];
    if (end > in.rows) return refuse("sequence %d ends at row %d of %d", sequence, end, in.rows);
    if (end < first || context < end - first) return refuse("sequence %d has %d rows in a context of %d", sequence, end - first, context);
    for (int row = first; row < end; row++)
      if (in.positions[row] != context - end + row)
        return refuse("row %d has position %d, its sequence puts it at %d", row, in.positions[row], context - end + row);
  }
  for (int layer = 0; layer < d.t.layers; layer++) {
    if (d.t.group_layer[layer] != 0) continue;  // one look at each group
    const PageTable& table = in.tables[d.t.group[layer]];
    int64_t layers = 0;
    for (int other = 0; other < d.t.layers; other++) layers += d.t.group[other] == d.t.group[layer];
    const int64_t needed = (layers * 2 * d.t.kv_heads + units_per_page - 1) / units_per_page;
    if (table.pages_per_block < needed) return refuse("a block has %d pages, %d are needed", table.pages_per_block, static_cast<int>(needed));
    for (int sequence = 0; sequence < in.sequences; sequence++) {
      const int rows = in.query_starts[sequence + 1] - in.query_starts[sequence], context = in.context_lens[sequence];
      if (rows == 0) continue;
      const int window = d.t.window[layer], first = window ? std::max(0, context - rows + 1 - window) / kBlockTokens : 0;
      const int last = (context - 1) / kBlockTokens;
      if (last >= table.blocks) return refuse("sequence %d has %d tokens, its page table %d blocks", sequence, context, table.blocks);
      for (int block = first; block <= last; block++)
        for (int64_t i = 0; i < needed; i++) {
          const int32_t page = table.pages[(static_cast<int64_t>(sequence) * table.blocks + block) * table.pages_per_block + i];
          if (page < 0 || page >= in.pages) return refuse("block %d of sequence %d lies on page %d of %lld", block, sequence, page, (long long)in.pages);
        }
    }
  }
  return true;
}

}  // namespace arena
