// The decoder step: fused ops over all rows of a ragged batch, each a few phases of the team's. Rounding points are those of kernels/reference.py.
#pragma once

#include "adapter.h"
#include "attention.h"

namespace arena {

constexpr int kMaxHeadDim = 512;
constexpr int kRowsAtOnce = 16, kHeadsAtOnce = 32;  // of what takes so little time that a few are not worth sharing
constexpr int kBlockQueries = 48;  // query rows that read a tile of K and V together

// Neighbouring tokens of one sequence whose queries are attended together.
struct QueryBlock {
  int sequence, first_row, positions;
};

// What a thread does at once: tiles first .. end - 1 of a block of queries, of one kv head. Where a block is cut into
// several pieces each is one tile; `number` counts those of all blocks, and the block's own begin at `first_number`.
struct Piece {
  int block, first_tile, end_tile, number, first_number, pieces;
};

// Neighbouring rows of one adapter, few enough for one tile.
template <class P>
struct AdaptedRows {
  const Adapter<P>* adapter;
  int first, end;
};

// Buffers of a step, kept from one to the next and grown when a step needs more. One for each team and precision.
template <class P>
struct Workspace {
  using Act = typename P::Act;
  std::vector<QueryBlock> blocks;
  std::vector<std::vector<Piece>> pieces;  // of each layer group
  std::vector<int32_t> row_sequence;       // [row]
  int64_t cut_pieces = 0;                  // the most `number` of any group
  std::vector<AdaptedRows<P>> adapted;     // of the rows that have an adapter
  std::vector<const Adapter<P>*> row_adapter;  // [row], null where it has none; empty where none has
  int64_t adapter_panels = 0;              // the most of any

  float *x, *y, *qkv, *cos_sin, *states, *cut_states, *reduced;
  Int8Rows bytes;  // of the activations that int8 weights are multiplied with
  Act *a, *q, *attended, *product;
  int32_t* finished;  // [kv head][block]

  void resize(const AnyDecoder& d, int64_t rows, int64_t wanted, int threads) {
    const auto lay_out = [&](Pieces memory) {
      const int64_t state = State::floats(std::max(kBlockQueries, d.group_size), d.t.head_dim);
      memory.take(x, rows * d.hidden_stride);
      memory.take(y, d.t.post_norms ? rows * d.hidden_stride : 0);
      memory.take(qkv, rows * d.qkv_stride);
      memory.take(cos_sin, rows * d.t.ropes * d.t.head_dim);
      memory.take(states, threads * state);
      memory.take(cut_states, d.t.kv_heads * cut_pieces * State::floats(d.group_size, d.t.head_dim));
      memory.take(a, std::max(rows, wanted) * d.hidden_stride);
      memory.take(q, rows * d.heads_width);
      memory.take(attended, rows * d.heads_width);
      memory.take(product, rows * d.inner_stride);
      bytes.stride = d.t.weights == kInt8 ? round_up(std::max({d.t.hidden, d.heads_width, d.t.inner}), kGroup) : 0;
      memory.take(bytes.numbers, std::max(rows, wanted) * bytes.stride);
      memory.take(bytes.scales, std::max(rows, wanted) * bytes.stride / kGroup);
      memory.take(bytes.starts, std::max(rows, wanted) * bytes.stride / kGroup);
      memory.take(finished, d.t.kv_heads * static_cast<int64_t>(blocks.size()));
      memory.take(reduced, static_cast<int64_t>(row_adapter.size()) * adapter_panels * kPanel);
      return memory.used();
    };
    lay_out(Pieces(mapping_.grow(lay_out(Pieces(nullptr)))));
    std::fill_n(finished, d.t.kv_heads * blocks.size(), 0);
  }

 private:
  Mapping mapping_;
};

template <class P, class Matrix>
class Step {
  using Act = typename P::Act;
  using Weight = typename P::Weight;

 public:
  Step(const Decoder<P, Matrix>& decoder, const StepInput& input, Team& team, Workspace<P>& workspace)
      : d(decoder), t(decoder.t), in(input), team(team), w(workspace) {
    plan_attention(team.count());
    plan_adapters();
    w.resize(d, in.rows, in.wanted, team.count());
  }

  void forward() const {
    embed();
    for (int layer = 0; layer < t.layers; layer++) {
      project_qkv(layer);
      attend(layer);
      project_output(layer);
      project_gate_up(layer);
      project_down(layer);
    }
    project_head();
  }

  void embed() const {
    each(in.rows, 1, [&](int64_t row) {
      d.embed(in.tokens[row], x_row(row));
      std::fill(x_row(row) + t.hidden, x_row(row) + d.hidden_stride, 0.f);
      for (int rope = 0; rope < t.ropes; rope++) tabulate_angles(row, rope);
    });
  }

  void project_qkv(int layer) const {
    const auto& weights = d.layers[layer];
    norm_rows(in.rows, weights.attention_norm, [](int64_t row) { return row; });
    multiply_adapted(layer, kQkvProduct, w.a, d.hidden_stride, weights.qkv, [&](int64_t row, int64_t panel, const float* values) {
      float* place = w.qkv + row * d.qkv_stride + panel * kPanel;
      const float* bias = weights.qkv_bias + panel * kPanel;
      for (int i = 0; i < kPanel; i += kLanes) store(place + i, add(load(values + i), load(bias + i)));
    });
    const int heads = t.heads + 2 * t.kv_heads;
    each(in.rows * static_cast<int64_t>(heads), kHeadsAtOnce, [&](int64_t item) {
      place_head(layer, static_cast<int>(item / heads), static_cast<int>(item % heads));
    });
  }

  // K and V that were computed elsewhere: kv [row][2][kv head][head_dim].
  void write_kv(int layer, const float* kv) const {
    const int heads = 2 * t.kv_heads;
    each(in.rows * static_cast<int64_t>(heads), kHeadsAtOnce, [&](int64_t item) {
      const int row = static_cast<int>(item / heads), head = static_cast<int>(item % heads);
      const float* values = kv + item * t.head_dim;
      head < t.kv_heads ? write_k(layer, row, head, values) : write_v(layer, row, head - t.kv_heads, values);
    });
  }

  // Piece by piece; where the next one begins is known early, so that its first units can be prefetched.
  void attend(int layer) const {
    const auto& pieces = w.pieces[t.group[layer]];
    const int64_t count = pieces.size(), total = count * t.kv_heads;
    const auto work_of = [&](int64_t number) { return Work{&pieces[number % count], static_cast<int>(number / count), pieces[number % count].first_tile}; };
    team.each(total, 1, [&](int thread, int64_t number, int64_t end) {
      Work work = work_of(number), next;
      Tile<P> tile, next_tile;
      locate(layer, work, tile);
      for (; number < end; work = next, tile = next_tile) {
        const bool last = work.is_last();
        next = last ? work_of(++number % total) : work.following();
        locate(layer, next, next_tile);
        tile.follow_with(next_tile);
        const Queries<P> queries = queries_of(layer, work);
        const State state = state_of(thread, work, queries);
        if (work.tile == work.piece->first_tile) state.reset(queries.rows, t.head_dim);
        attend_tile(queries, tile, state);
        if (last) finish(work, queries, state);
      }
    });
  }

  void project_output(int layer) const {
    const auto& weights = d.layers[layer];
    add_linear(layer, kOProduct, w.attended, d.heads_width, weights.o, weights.post_attention_norm);
  }

  void project_gate_up(int layer) const {
    const auto& weights = d.layers[layer];
    norm_rows(in.rows, weights.mlp_norm, [](int64_t row) { return row; });
    multiply_adapted(layer, kGateUpProduct, w.a, d.hidden_stride, weights.gate_up, [&](int64_t row, int64_t panel, const float* values) {
      Act* place = w.product + row * d.inner_stride + panel * (kPanel / 2);
      for (int i = 0; i < kPanel / 2; i += kLanes) {
        const vf gate = load(values + i), up = load(values + kPanel / 2 + i);
        P::store_act(place + i, mul(t.activation == kSilu ? silu(gate) : gelu_tanh(gate), up));
      }
    });
  }

  void project_down(int layer) const {
    const auto& weights = d.layers[layer];
    add_linear(layer, kDownProduct, w.product, d.inner_stride, weights.down, weights.post_mlp_norm);
  }

  void project_head() const {
    norm_rows(in.wanted, d.final_norm, [&](int64_t row) { return in.logit_rows[row]; });
    const bool as_they_are = t.logit_scale == 1 && !t.logit_softcap;
    multiply(w.a, d.hidden_stride, in.wanted, d.head, [&](int64_t row, int64_t panel, const float* values) {
      float* place = in.logits + row * in.logits_stride + panel * kPanel;
      if (as_they_are) return void(std::copy_n(values, kPanel, place));
      for (int i = 0; i < kPanel; i += kLanes) {
        const vf logits = mul(load(values + i), set(t.logit_scale));
        store(place + i, t.logit_softcap ? soft_cap(logits, t.logit_softcap) : logits);
      }
    });
  }

 private:
  template <class Body>
  void each(int64_t total, int64_t grain, Body body) const {
    team.each(total, grain, [&](int, int64_t item, int64_t end) {
      for (; item < end; item++) body(item);
    });
  }

  template <class Sink>
  void multiply(const Act* a, int64_t stride, int64_t rows, const Matrix& layer, Sink sink) const {
    if constexpr (std::is_same_v<Matrix, Int8Linear<P>>)
      linear(team, a, stride, rows, layer, w.bytes, sink);
    else
      linear(team, a, stride, rows, layer, sink);
  }

  // Of all rows, with what their adapters add before the sink sees it.
  template <class Sink>
  void multiply_adapted(int layer, Product product, const Act* a, int64_t stride, const Matrix& matrix, Sink sink) const {
    if (w.adapted.empty()) return multiply(a, stride, in.rows, matrix, sink);
    reduce(layer, product, a, stride);
    multiply(a, stride, in.rows, matrix, [&](int64_t row, int64_t panel, float* values) {
      if (const Adapter<P>* adapter = w.row_adapter[row])
        adapter->of(layer, product).add_to(values, panel, reduced_row(row));
      sink(row, panel, values);
    });
  }

  // reduced[row] = scales * the `a` matrices of its adapter
  void reduce(int layer, Product product, const Act* a, int64_t stride) const {
    team.each(w.adapted.size() * w.adapter_panels, 1, [&](int, int64_t item, int64_t end) {
      alignas(64) float tile[P::kRows * kPanel];
      for (; item < end; item++) {
        const AdaptedRows<P>& rows = w.adapted[item / w.adapter_panels];
        const LowRank<P>& low = rows.adapter->of(layer, product);
        const int64_t panel = item % w.adapter_panels;
        if (panel >= low.a.panel_count) continue;
        const typename P::Weight* weights = low.a.panel(panel);
        panel_kernel<P>(0, rows.end - rows.first)(a + rows.first * stride, stride, weights, low.a.steps, tile, weights);
        for (int row = rows.first; row < rows.end; row++)
          for (int i = 0; i < kPanel; i += kLanes)
            store(reduced_row(row) + panel * kPanel + i,
                  mul(load(tile + (row - rows.first) * kPanel + i), load(low.scales + panel * kPanel + i)));
      }
    });
  }

  float* reduced_row(int64_t row) const { return w.reduced + row * w.adapter_panels * kPanel; }

  float* x_row(int64_t row) const { return w.x + row * d.hidden_stride; }

  static vf silu(vf x) { return mul(x, sigmoid(x)); }
  // x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  static vf gelu_tanh(vf x) {
    const vf cubic = fma(mul(mul(x, x), set(0.044715f)), x, x);
    return mul(x, sigmoid(mul(cubic, set(2 * 0.7978845608028654f))));
  }

  static vf soft_cap(vf x, float cap) { return mul(set(cap), tanh(mul(x, set(1 / cap)))); }

  // put(i, values) of x / rms(x) * weight; `padded` values are read, those from `size` on are 0.
  template <class Put>
  void rms_norm(const float* x, const float* weight, int64_t padded, int size, Put put) const {
    vf squares = zero();
    for (int64_t i = 0; i < padded; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const vf scale = set(1.f / std::sqrt(sum_of_lanes(squares) / size + t.norm_eps));
    for (int64_t i = 0; i < padded; i += kLanes) put(i, mul(mul(load(x + i), scale), load(weight + i)));
  }

  // a[row] = norm of x[source(row)]
  template <class Source>
  void norm_rows(int64_t rows, const float* weight, Source source) const {
    each(rows, kRowsAtOnce, [&](int64_t row) {
      Act* a = w.a + row * d.hidden_stride;
      rms_norm(x_row(source(row)), weight, d.hidden_stride, t.hidden, [&](int64_t i, vf value) { P::store_act(a + i, value); });
    });
  }

  // x += layer(a), or x += norm of it where the decoder has post norms; what is added is scaled
  void add_linear(int layer, Product product, const Act* a, int64_t stride, const Matrix& matrix, const float* post_norm) const {
    const vf scale = set(t.residual_scale);
    multiply_adapted(layer, product, a, stride, matrix, [&](int64_t row, int64_t panel, const float* values) {
      float* place = (t.post_norms ? w.y : w.x) + row * d.hidden_stride + panel * kPanel;
      for (int i = 0; i < kPanel; i += kLanes)
        store(place + i, t.post_norms ? load(values + i) : fma(load(values + i), scale, load(place + i)));
    });
    if (!t.post_norms) return;
    each(in.rows, kRowsAtOnce, [&](int64_t row) {
      float* x = x_row(row);
      rms_norm(w.y + row * d.hidden_stride, post_norm, d.hidden_stride, t.hidden,
               [&](int64_t i, vf value) { store(x + i, fma(value, scale, load(x + i))); });
    });
  }

  void tabulate_angles(int64_t row, int rope) const {
    const int half = t.head_dim / 2, pairs = t.rope_pairs[rope];
    float* cos = w.cos_sin + (rope * static_cast<int64_t>(in.rows) + row) * t.head_dim;
    for (int i = 0; i < pairs; i++) {
      const float angle = static_cast<float>(in.positions[row]) * t.inv_freq[rope * half + i];
      cos[i] = std::cos(angle) * t.rope_factor[rope];
      cos[half + i] = std::sin(angle) * t.rope_factor[rope];
    }
  }

  // Norm and rotation of one head of qkv; q goes into its buffer, K and V into their units.
  void place_head(int layer, int row, int head) const {
    const int dims = t.head_dim, half = dims / 2, pairs = t.rope_pairs[t.rope[layer]];
    const float* values = w.qkv + row * d.qkv_stride + head * dims;
    if (head >= t.heads + t.kv_heads) return write_v(layer, row, head - t.heads - t.kv_heads, values);
    const bool is_q = head < t.heads;
    float normed[kMaxHeadDim], rotated[kMaxHeadDim];
    if (t.qk_norm) {
      const float* weight = is_q ? d.layers[layer].q_norm : d.layers[layer].k_norm;
      rms_norm(values, weight, dims, dims, [&](int64_t i, vf value) { store(normed + i, value); });
      values = normed;
    }
    const float* cos = w.cos_sin + (t.rope[layer] * static_cast<int64_t>(in.rows) + row) * dims;
    for (int i = 0; i < pairs; i++) {
      rotated[i] = values[i] * cos[i] - values[pairs + i] * cos[half + i];
      rotated[pairs + i] = values[pairs + i] * cos[i] + values[i] * cos[half + i];
    }
    if (2 * pairs < dims) std::copy(values + 2 * pairs, values + dims, rotated + 2 * pairs);
    if (!is_q) return write_k(layer, row, head - t.heads, rotated);
    const int kv_head = head / d.group_size, place = head % d.group_size;
    Act* q = w.q + ((kv_head * static_cast<int64_t>(in.rows) + row) * d.group_size + place) * dims;
    for (int i = 0; i < dims; i += kLanes) P::store_act(q + i, load(rotated + i));
  }

  void write_k(int layer, int row, int kv_head, const float* values) const {
    const int slot = in.positions[row] % kBlockTokens;
    Weight* unit = unit_place(layer, 0, kv_head).of(in, w.row_sequence[row], in.positions[row] / kBlockTokens);
    for (int i = 0; i < t.head_dim; i++)
      unit[(i / P::step * kBlockTokens + slot) * P::step + i % P::step] = P::to_weight(values[i]);
  }

  void write_v(int layer, int row, int kv_head, const float* values) const {
    const int slot = in.positions[row] % kBlockTokens;
    Weight* unit = unit_place(layer, 1, kv_head).of(in, w.row_sequence[row], in.positions[row] / kBlockTokens);
    for (int i = 0; i < t.head_dim; i++)
      unit[(slot / P::step * t.head_dim + i) * P::step + slot % P::step] = P::to_weight(values[i]);
  }

  // Where a (layer, kind, kv head) lies in every block; the address is that of kernels/spec.py.
  struct UnitPlace {
    const PageTable& table;
    int64_t page_in_block, offset;

    Weight* of(const StepInput& in, int64_t sequence, int64_t block) const {
      const int64_t page = table.pages[(sequence * table.blocks + block) * table.pages_per_block + page_in_block];
      return reinterpret_cast<Weight*>(in.pool + page * in.page_bytes + offset);
    }
  };
  UnitPlace unit_place(int layer, int kind, int kv_head) const {
    const int64_t unit_bytes = static_cast<int64_t>(kBlockTokens) * t.head_dim * sizeof(Weight);
    const int64_t units_per_page = in.page_bytes / unit_bytes;
    const int64_t unit = (t.group_layer[layer] * 2 + kind) * t.kv_heads + kv_head;
    return {in.tables[t.group[layer]], unit / units_per_page, unit % units_per_page * unit_bytes};
  }

  // Rows of an adapter, as far as they lie side by side, in tiles.
  void plan_adapters() {
    w.adapted.clear();
    w.row_adapter.assign(in.adapter_count ? in.rows : 0, nullptr);
    w.adapter_panels = 0;
    for (int row = 0; row < static_cast<int>(w.row_adapter.size()); row++) {
      const int number = in.sequence_adapters[w.row_sequence[row]];
      if (number < 0) continue;
      const auto* adapter = w.row_adapter[row] = static_cast<const Adapter<P>*>(in.adapters[number]);
      w.adapter_panels = std::max(w.adapter_panels, adapter->panels());
      AdaptedRows<P>* last = w.adapted.empty() ? nullptr : &w.adapted.back();
      if (last && last->adapter == adapter && last->end == row && row - last->first < P::kRows)
        last->end++;
      else
        w.adapted.push_back({adapter, row, row + 1});
    }
  }

  // ------------------------------------------------------------------------------------------------------ attention
  // One tile of a piece. They are numbered kv head by kv head, so that sequences which share pages find them in the cache.
  struct Work {
    const Piece* piece = nullptr;
    int kv_head = 0, tile = 0;
    bool is_last() const { return tile + 1 == piece->end_tile; }
    Work following() const { return {piece, kv_head, tile + 1}; }
  };

  int first_seen(int layer_window, int position) const { return layer_window ? std::max(0, position + 1 - layer_window) : 0; }

  // Prefill: blocks of kBlockQueries rows. Decode of few sequences: every tile a piece of its own, for all threads.
  void plan_attention(int threads) {
    w.blocks.clear();
    w.row_sequence.resize(in.rows);
    const int most = std::max(1, kBlockQueries / d.group_size);
    for (int sequence = 0; sequence < in.sequences; sequence++) {
      const int first = in.query_starts[sequence], end = in.query_starts[sequence + 1];
      std::fill(w.row_sequence.begin() + first, w.row_sequence.begin() + end, sequence);
      for (int row = first; row < end; row += most) w.blocks.push_back({sequence, row, std::min(most, end - row)});
    }
    const bool cut = threads > 1 && t.kv_heads * static_cast<int>(w.blocks.size()) < 4 * threads;
    w.pieces.resize(d.group_count);
    w.cut_pieces = 0;
    for (int group = 0; group < d.group_count; group++) plan_pieces(group, cut);
  }

  void plan_pieces(int group, bool cut) {
    int window = 0, number = 0;
    for (int layer = 0; layer < t.layers; layer++)
      if (t.group[layer] == group) window = t.window[layer];
    auto& pieces = w.pieces[group];
    pieces.clear();
    for (int block = 0; block < static_cast<int>(w.blocks.size()); block++) {
      const int position = in.positions[w.blocks[block].first_row];
      const int first = first_seen(window, position) / kTile, end = (position + w.blocks[block].positions - 1) / kTile + 1;
      const bool is_cut = cut && end - first > 1 && w.blocks[block].positions == 1;
      if (!is_cut) {
        pieces.push_back({block, first, end, -1, -1, 1});
        continue;
      }
      const int first_number = number;
      for (int tile = first; tile < end; tile++) pieces.push_back({block, tile, tile + 1, number++, first_number, end - first});
    }
    w.cut_pieces = std::max<int64_t>(w.cut_pieces, number);
  }

  Queries<P> queries_of(int layer, const Work& work) const {
    const QueryBlock& block = w.blocks[work.piece->block];
    const Act* q = w.q + (work.kv_head * static_cast<int64_t>(in.rows) + block.first_row) * d.group_size * t.head_dim;
    return {q, block.positions * d.group_size, d.group_size, t.head_dim, in.positions[block.first_row], t.window[layer],
            (t.attention_softcap ? t.attention_softcap : t.attention_scale) * kLog2E,
            t.attention_softcap ? t.attention_scale / t.attention_softcap : 0.f};
  }

  void locate(int layer, const Work& work, Tile<P>& tile) const {
    const QueryBlock& block = w.blocks[work.piece->block];
    const int position = in.positions[block.first_row];
    const int first = std::max(work.tile * kTileUnits, first_seen(t.window[layer], position) / kBlockTokens);
    const int end = std::min((work.tile + 1) * kTileUnits, (position + block.positions - 1) / kBlockTokens + 1);
    const UnitPlace k = unit_place(layer, 0, work.kv_head), v = unit_place(layer, 1, work.kv_head);
    tile.start = first * kBlockTokens;
    tile.units = end - first;
    for (int unit = 0; unit < tile.units; unit++) {
      tile.unit[unit] = k.of(in, block.sequence, first + unit);
      tile.unit[tile.units + unit] = v.of(in, block.sequence, first + unit);
    }
    for (int unit = 2 * tile.units; unit < kUnitsAhead; unit++) tile.unit[unit] = tile.unit[0];  // of a tile of one unit
  }

  State state_of(int thread, const Work& work, const Queries<P>& queries) const {
    if (work.piece->pieces > 1) return cut_state(work.kv_head, work.piece->number);
    const int64_t size = State::floats(std::max(kBlockQueries, d.group_size), t.head_dim);
    return {w.states + thread * size, queries.rows};
  }

  State cut_state(int kv_head, int number) const {
    const int64_t size = State::floats(d.group_size, t.head_dim);
    return {w.cut_states + (kv_head * w.cut_pieces + number) * size, d.group_size};
  }

  // Of a block in several pieces, the thread that ends the last one folds them, in order.
  void finish(const Work& work, const Queries<P>& queries, State state) const {
    const Piece& piece = *work.piece;
    if (piece.pieces > 1) {
      int32_t& finished = w.finished[work.kv_head * w.blocks.size() + piece.block];
      if (__atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL) < piece.pieces) return;
      finished = 0;
      state = cut_state(work.kv_head, piece.first_number);
      for (int number = 1; number < piece.pieces; number++)
        fold_state(state, cut_state(work.kv_head, piece.first_number + number), queries.rows, t.head_dim);
    }
    for (int row = 0; row < queries.rows; row++) {
      const vf share = set(1.f / sum_of_lanes(load(state.sum + row * kLanes)));
      const int token = w.blocks[piece.block].first_row + row / d.group_size;
      const int head = work.kv_head * d.group_size + row % d.group_size;
      Act* place = w.attended + static_cast<int64_t>(token) * d.heads_width + head * t.head_dim;
      for (int dim = 0; dim < t.head_dim; dim += kLanes)
        P::store_act(place + dim, mul(load(state.output + row * t.head_dim + dim), share));
    }
  }

  const Decoder<P, Matrix>& d;
  const Traits& t;
  const StepInput& in;
  Team& team;
  Workspace<P>& w;
};

}  // namespace arena
