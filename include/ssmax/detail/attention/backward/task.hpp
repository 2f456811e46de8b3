// Computes the steps of the backward pass on one kv head: facts about its queries, query blocks × key blocks
// (block.hpp), sums, results.
//
//     dq = c·scale·dq̃      dc = scale·⟨q, dq̃⟩
//
// So dc requires neither another pass over the keys nor a division by c, which may be 0. With a score function, dq =
// scale·dq̃, and dc is summed while the logits are computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../kernels/dot.hpp"
#include "../../kernels/rows.hpp"
#include "../../rows/state.hpp"
#include "block.hpp"
#include "load.hpp"
#include "query_sums.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// The backward pass on one kv head. Operand is the type of the products' operands: Compute, or bfloat16 (see
/// route.hpp).
template <class Compute, class Operand = Compute>
class BackwardTask {
 public:
  using Memory = BackwardScratch<Compute, Operand>;

  BackwardTask(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
               const Memory& memory, const CallSums& sums)
      : problem_(problem),
        forward_(problem.forward),
        variant_(variant),
        gradient_kernels_(detail::kernels<PrefillBackwardKernels<Compute>>()),
        memory_(memory),
        loader_(problem, variant, memory),
        multipliers_(problem.forward.scale, variant),
        block_(variant, memory, problem.forward.width(), problem.forward.value_width(), problem.forward.scale,
               problem.forward.dropout, static_cast<bool>(sums)),
        sums_(sums) {}

  /// Selects a kv head of a sequence for the other members, and the memory of its sums.
  void enter(index_t sequence, index_t kv_head, std::byte* sums) {
    const bool is_same = sequence == sequence_.batch;
    if (!is_same) {
      sequence_ = sequence_of(problem_, sequence);
      sums_in_place_ = keys_have_one_sum();
    }
    Arena arena(sums);
    head_sums_ = HeadSums<Compute, Operand>(arena, problem_, sequence_, kv_head, memory_);
    if (sums_in_place_) head_sums_.dk.partials = head_sums_.dv.partials = nullptr;
    if (is_same && kv_head == kv_head_) return;
    batch_ = sequence;
    kv_head_ = kv_head;
    loaded_queries_ = -1;
  }

  void attend_all() {
    const index_t queries = query_blocks(sequence_), keys = key_blocks(sequence_);
    for (index_t j = 0; j < keys; ++j) prepare_keys(j);
    for (index_t i = 0; i < queries; ++i) {
      survey(i);
      for (index_t j = 0; j < keys; ++j) attend(i, j);
      finish_queries(i);
    }
    for (index_t j = 0; j < keys; ++j) finish_keys(j);
  }

  /// Computes the facts about a query block, and sets its partial sums to 0.
  void survey(index_t block) const {
    const index_t first = block * query_block;
    const KeyRange stored = sequence_.stored;
    const bool asked_once = variant_.shows_same_keys && forward_.heads_per_kv_head() == 1;
    Hull seen;
    QueryRow seen_by{};
    std::uint32_t* visible = head_sums_.visible_blocks + block * head_sums_.visible_words;
    std::fill_n(visible, head_sums_.visible_words, std::uint32_t{0});
    QueryCursor cursor(forward_, sequence_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      if (row == first || !asked_once) seen_by = variant_.row(*cursor, stored);
      prefetch_rows(cursor);
      QueryFacts<Compute>& facts = head_sums_.facts[row];
      find_facts(cursor, seen_by, facts);
      seen.add(facts.keys);
      if (variant_.has_runs) find_visible_blocks(*cursor, facts.keys, visible);
      if (sums_) begin_sums(*cursor, seen_by, facts);
    }
    head_sums_.seen[block] = seen.any;
    std::fill_n(queries_sums(block), sums_in_use(block), Compute{0});
  }

  /// Copies a key block into rows if necessary, finds NaN and infinities in K, and sets the partial sums to 0 or, if
  /// dk and dv hold sums of earlier queries, to these.
  void prepare_keys(index_t block) const {
    const index_t first = block * backward_key_block, count = keys_of(block);
    if (sequence_.rows > 0) {
      if (packs_keys(problem_, sequence_, memory_.kernels)) copy_keys(block);
      find_nonfinite_keys(block);
    }
    if (problem_.stage.continues && sums_in_place_) return;
    for (const KeySums<Compute>* sums : {&head_sums_.dk, &head_sums_.dv}) {
      Compute* const partial = sums->partial(first);
      std::fill_n(partial, in_passes(count) * sums->pitch, Compute{0});
      if (problem_.stage.continues)
        gradient_kernels_.copy_rows(sums->whole(first), sums->stride(), count, sums->width, partial,
                                    sums->pitch);
    }
  }

  /// Adds the products of a query block and a key block to their gradients. After the last block of a partial sum
  /// (blocks_per_sum), adds the partial sum to the whole sum. Requires a call for every pair of blocks, also if no
  /// key is visible.
  void attend(index_t queries, index_t keys) {
    if (sees_any(queries, keys)) {
      load_queries(queries);
      const index_t count = queries_of(queries);
      const bool has_sums = sums_dc_in_tiles();
      if (has_sums) std::fill_n(memory_.sums, in_tiles(count) * memory_.sums_of_row, 0.0);
      block_.attend(block_keys(keys), count, queries_sums(queries));
      if (has_sums && sums_) add_row_sums(queries);
    }
    const auto ends = [](index_t i, index_t count) {
      return (i + 1) % blocks_per_sum == 0 || i + 1 == count;
    };
    bool has_any = false;
    if (ends(keys, key_blocks(sequence_))) {
      const index_t begin = keys / blocks_per_sum * blocks_per_sum;
      for (index_t j = begin; j <= keys; ++j) has_any |= sees_any(queries, j);
      const bool is_first = begin == 0 && problem_.stage.first;
      if (has_any || is_first) add_queries(queries, is_first, keys + 1 == key_blocks(sequence_));
    }
    if (!sums_in_place_ && ends(queries, query_blocks(sequence_))) {
      const index_t begin = queries / blocks_per_sum * blocks_per_sum;
      has_any = false;
      for (index_t i = begin; i <= queries; ++i) has_any |= sees_any(i, keys);
      if (has_any || begin == 0) add_keys(keys, begin == 0, queries + 1 == query_blocks(sequence_));
    }
  }

  /// Turns sums into dq. Also computes dc, unless the tiles have summed dc.
  void finish_queries(index_t block) const {
    const index_t first = block * query_block, d = forward_.width();
    const auto multiply = detail::kernels<RowKernels<Compute>>().multiply;
    QueryCursor cursor(forward_, sequence_, kv_head_, first);
    for (index_t row = first; row < first + queries_of(block); ++row, cursor.next()) {
      const QueryFacts<Compute>& facts = head_sums_.facts[row];
      Compute* sums = head_sums_.query_sums(problem_, cursor, row);
      if (sequence_.keys == 0 && problem_.stage.first) std::fill_n(sums, d, Compute{0});
      if (!problem_.stage.last) continue;
      if (sums_ && !sums_dc_in_tiles() && facts.attends) {
        const Compute* q = load_query(forward_, variant_, row_of(cursor), memory_.staged);
        sums_of(*cursor)[0] +=
            forward_.scale * static_cast<double>(detail::kernels<DotKernels<Compute>>().dot(q, sums, d));
      }
      if (facts.attends) {
        // On the bf16 path, the gradients of the logits already include this factor.
        const double factor = multipliers_.of_gradient(facts.multiplier);
        if (!Op::is_bf16) multiply(sums, d, static_cast<Compute>(factor), sums);
        if (forward_.has_rope()) {
          rotate(forward_.rope, {sums, d}, {sums, d}, 1, d, rope_place(forward_, variant_, *cursor), true);
        }
      }
      store(problem_.dq, cursor.entry(), cursor.head(), cursor.row(), sums);
    }
  }

  /// Turns sums into dk and dv.
  void finish_keys(index_t block) const {
    if (problem_.sums) return;
    if (sequence_.rows > 0 && !forward_.has_rope() && !head_sums_.has_arrays)
      return;  // the results hold the sums
    const Query query{batch_, kv_head_ * forward_.heads_per_kv_head(), 0, sequence_.shape};
    const index_t first = block * backward_key_block, d = forward_.width();
    for (index_t key = first; key < first + keys_of(block); ++key) {
      Compute *dk = head_sums_.dk.whole(key), *dv = head_sums_.dv.whole(key);
      if (sequence_.rows == 0) {
        std::fill_n(dk, d, Compute{0});
        std::fill_n(dv, forward_.value_width(), Compute{0});
      }
      if (forward_.rotates_keys() && sequence_.rows > 0) {
        const index_t position =
            forward_.key_position + variant_.key_position(query, sequence_.stored.begin + key);
        rotate(forward_.rope, {dk, d}, {dk, d}, 1, d, {position, batch_}, true);
      }
      const index_t entry = sequence_.key_entry, row = sequence_.first_key_row + key;
      store(problem_.dk, entry, kv_head_, row, dk);
      store(problem_.dv, entry, kv_head_, row, dv);
    }
  }

 private:
  static constexpr Compute infinity = std::numeric_limits<Compute>::infinity();
  using Op = Operands<Compute, Operand>;

  /// Returns whether dc is summed while the logits are computed, together with the parameters of a score function.
  bool sums_dc_in_tiles() const { return Op::is_bf16 || multipliers_.has_score; }

  index_t queries_of(index_t block) const {
    return std::min(query_block, sequence_.rows - block * query_block);
  }
  index_t in_tiles(index_t queries) const { return round_up(queries, memory_.tile_lanes); }
  index_t in_passes(index_t keys) const { return round_up(keys, memory_.products.pass); }
  index_t keys_of(index_t block) const {
    return std::min(backward_key_block, sequence_.keys - block * backward_key_block);
  }
  index_t place_of(const Query& query) const { return detail::place_of(forward_, sequence_, query); }
  double* sums_of(const Query& query) const { return sums_.sums + place_of(query) * memory_.sums_of_row; }
  /// Returns the row of the query at a cursor, without what it sees.
  static QueryRow row_of(const QueryCursor& at) { return {.query = *at, .sequence = at.sequence()}; }

  /// Returns whether this call adds the share of scaled sinks to dc. If the keys come in several calls, one call
  /// adds the share: the first stage or, without stages, the call with key 0.
  bool adds_sinks() const {
    if (!problem_.scaled_sinks) return false;
    return problem_.stage.kept ? problem_.stage.first : sequence_.stored.begin == 0;
  }

  /// Prefetches row + 16: the hardware prefetcher does not follow rows of fewer than 32 channels (2 to 8 % of a call
  /// with 16 channels and 1200 queries). The row may lie past the end.
  SSMAX_INLINE void prefetch_rows(const QueryCursor& at) const {
    const index_t row = at.row() + 16;
    problem_.dout.prefetch(at.entry(), at.head(), row);
    problem_.out.prefetch(at.entry(), at.head(), row);
    forward_.q.prefetch(at.entry(), at.head(), row);
    problem_.dq.prefetch(at.entry(), at.head(), row);
  }

  /// Computes the facts about a query from its row of the variant. Writes the facts in place: a copy would stall on
  /// store forwarding.
  void find_facts(const QueryCursor& at, const QueryRow& seen_by, QueryFacts<Compute>& facts) const {
    const index_t entry = at.entry(), head = at.head(), row = at.row(), dv = forward_.value_width();
    const Compute lse = problem_.lse(entry, head, row);
    facts.lse = lse;
    facts.attends = seen_by.n > 0 && lse != -infinity;
    facts.keys = lse == -infinity ? KeyRange{} : seen_by.keys;
    facts.multiplier = seen_by.multiplier;
    Compute delta{0};
    if (seen_by.n > 0) {
      Compute *wide = memory_.staged, *other = memory_.staged + memory_.pitch;
      delta = detail::kernels<DotKernels<Compute>>().dot(problem_.dout.load(entry, head, row, wide),
                                                         problem_.out.load(entry, head, row, other), dv);
    }
    if (problem_.dlse.is_given()) delta -= problem_.dlse(entry, head, row);
    facts.delta = delta;
  }

  /// Initializes a query's sums of the call with the share of its sink.
  void begin_sums(const Query& query, const QueryRow& seen_by, const QueryFacts<Compute>& facts) const {
    if (problem_.stage.first) std::fill_n(sums_of(query), memory_.sums_of_row, 0.0);
    QueryReport& report =
        sums_.reports[place_of(query)] = {seen_by.n, seen_by.n > 0 ? variant_.row_position(query) : 0, 0};
    if (problem_.sinks.empty()) return;
    const auto sink = static_cast<double>(problem_.sinks[static_cast<std::size_t>(query.head)]);
    const auto lse = static_cast<double>(facts.lse);
    const double term = sink_term(sink, problem_.scaled_sinks, seen_by.multiplier, seen_by.n > 0);
    if (term == -infinity) return;
    // If the sink is the only term, term equals lse, also where both are +inf: its share is 1.
    const double dterm = -(term == lse ? 1 : std::exp(term - lse)) * static_cast<double>(facts.delta);
    report.dsink = problem_.scaled_sinks ? seen_by.multiplier * dterm : dterm;
    if (adds_sinks()) sums_of(query)[0] += sink * dterm;
  }

  /// Returns whether a key of the key block is visible to a query of the query block.
  bool sees_any(index_t queries, index_t keys) const {
    const KeyRange& seen = head_sums_.seen[queries];
    const index_t first = sequence_.stored.begin + keys * backward_key_block;
    if (seen.begin >= first + backward_key_block || seen.end <= first) return false;
    if (!variant_.has_runs) return true;
    const std::uint32_t word = head_sums_.visible_blocks[queries * head_sums_.visible_words + keys / 32];
    return (word >> (keys % 32) & 1) != 0;
  }

  /// Under a mask with runs: sets the bit of each key block that has a key visible to the query.
  void find_visible_blocks(const Query& query, KeyRange keys, std::uint32_t* words) const {
    const QueryRow row{query, keys, 0};
    for (index_t i = 0; i < head_sums_.visible_words; ++i) {
      const index_t first = sequence_.stored.begin + i * 32 * backward_key_block;
      words[i] |=
          variant_.visible_blocks(&row, 1, {first, first + 32 * backward_key_block}, backward_key_block);
    }
  }

  /// Returns the partial sums of a query block: [tiles][d_pitch][tile_lanes].
  Compute* queries_sums(index_t block) const { return head_sums_.dq + block * sums_of_block(); }
  index_t sums_of_block() const { return memory_.tiles * memory_.tile_lanes * memory_.d_pitch; }
  index_t sums_in_use(index_t block) const { return in_tiles(queries_of(block)) * memory_.d_pitch; }

  /// Returns whether each key has one partial sum and the results have the layout of the partial sums.
  bool keys_have_one_sum() const {
    return problem_.stores_sums() && query_blocks(sequence_) <= blocks_per_sum &&
           sequence_.keys % memory_.kernels.pass == 0 && forward_.width() == memory_.d_pitch &&
           forward_.value_width() == memory_.dv_pitch && problem_.dk.stride(2) == memory_.d_pitch &&
           problem_.dv.stride(2) == memory_.dv_pitch;
  }

  /// Copies a key block into rows of K and V, padded with 0 to whole vectors and whole passes.
  void copy_keys(index_t block) const {
    const index_t first = block * backward_key_block, count = keys_of(block);
    Operand* k = head_sums_.k + first * head_sums_.k_stride;
    Operand* v = head_sums_.v + first * head_sums_.v_stride;
    std::fill_n(k, in_passes(count) * head_sums_.k_stride, Operand{});
    std::fill_n(v, in_passes(count) * head_sums_.v_stride, Operand{});
    const index_t key = sequence_.stored.begin + first;
    const HeadKeys keys{batch_, kv_head_, {key, key + count}};
    Op::load_keys(forward_, variant_, sequence_.shape, keys, memory_.widened_row, {k, head_sums_.k_stride});
    Op::load_values(forward_.keys, keys, {v, head_sums_.v_stride});
  }

  /// Finds NaN and infinities in a block of K. The bf16 path also packs its panels, with 0 for NaN and infinities.
  void find_nonfinite_keys(index_t block) const {
    const index_t first = block * backward_key_block, count = keys_of(block), d = forward_.width();
    bool& finite = head_sums_.blocks_are_finite[block] = true;
    const BlockKeys<Compute, Operand> keys = block_keys(block);
    finite = keys.k.stride == d ? memory_.products.all_finite(keys.k.first, 0, 1, count * d)
                                : memory_.products.all_finite(keys.k.first, keys.k.stride, count, d);
    for (index_t i = 0; !finite && i < backward_key_block; ++i) {
      head_sums_.keys_are_finite[first + i] = i >= count || memory_.products.all_finite(keys.k[i], 0, 1, d);
    }
    if constexpr (Op::is_bf16) {
      loader_.pack_panels(keys.k, count, finite, panels_of(block), head_sums_.panel);
    }
  }

  /// Returns a key block. Its rows are read in place or, if they were copied, from the copy.
  BlockKeys<Compute, Operand> block_keys(index_t block) const {
    const index_t first = block * backward_key_block, key = sequence_.stored.begin + first;
    BlockKeys<Compute, Operand> keys{.range = {key, key + keys_of(block)},
                                     .length = sequence_.shape.keys,
                                     .k = {head_sums_.k + first * head_sums_.k_stride, head_sums_.k_stride},
                                     .v = {head_sums_.v + first * head_sums_.v_stride, head_sums_.v_stride},
                                     .panels = panels_of(block),
                                     .panel_stride = head_sums_.panel,
                                     .dk = head_sums_.dk.partial(first),
                                     .dv = head_sums_.dv.partial(first),
                                     .finite = head_sums_.blocks_are_finite[block],
                                     .are_finite = head_sums_.keys_are_finite + first};
    if (packs_keys(problem_, sequence_, memory_.kernels)) return keys;
    const AnyKeyRun run = forward_.keys.run(batch_, kv_head_, key);
    keys.k = {static_cast<const Operand*>(run.k), run.k_stride};
    keys.v = {static_cast<const Operand*>(run.v), run.v_stride};
    return keys;
  }
  Operand* panels_of(index_t block) const {
    return head_sums_.panels + block * (memory_.d_pitch / memory_.products.pass) * head_sums_.panel;
  }

  /// Loads queries and dout of a block, unless the last call loaded the same block.
  void load_queries(index_t block) {
    if (block == loaded_queries_) return;
    loaded_queries_ = block;
    const index_t first = block * query_block;
    loader_.load_queries({forward_, sequence_, kv_head_, first}, queries_of(block), head_sums_.facts + first);
  }

  /// Adds the sums of each query of the block to the sums of the call.
  void add_row_sums(index_t block) const {
    QueryCursor cursor(forward_, sequence_, kv_head_, block * query_block);
    for (index_t i = 0; i < queries_of(block); ++i, cursor.next()) {
      double* sums = sums_of(*cursor);
      for (index_t j = 0; j < memory_.sums_of_row; ++j) sums[j] += memory_.sums[i * memory_.sums_of_row + j];
    }
  }

  /// Adds the partial sums to the whole sums, and sets the partial sums to 0. Exception: the first partial sums are
  /// copied. Exception: the last partial sums are not set to 0.
  void add_queries(index_t block, bool is_first, bool is_last) const {
    const index_t first = block * query_block, count = queries_of(block), d = forward_.width(),
                  tile_lanes = memory_.tile_lanes;
    Compute* block_sums = queries_sums(block);
    const auto add_row = is_first ? gradient_kernels_.copy_rows : gradient_kernels_.add_rows;
    QueryCursor cursor(forward_, sequence_, kv_head_, first);
    for (index_t i = 0; i < count; i += memory_.kernels.width) {
      const Compute* dq = block_sums + i / tile_lanes * memory_.d_pitch * tile_lanes + i % tile_lanes;
      const index_t lanes = std::min(memory_.kernels.width, count - i);
      for (index_t c = 0; c < d; c += memory_.kernels.width) {
        const index_t channels = std::min(memory_.kernels.width, d - c);
        for (index_t r = 0; r < channels; ++r) memory_.in[r] = dq + (c + r) * tile_lanes;
        memory_.kernels.transpose(memory_.in, channels, lanes, nullptr, memory_.staged + c, memory_.pitch);
      }
      for (index_t lane = 0; lane < lanes; ++lane, cursor.next()) {
        add_row(memory_.staged + lane * memory_.pitch, 0, 1, d,
                head_sums_.query_sums(problem_, cursor, first + i + lane), 0);
      }
    }
    if (!is_last) std::fill_n(block_sums, sums_in_use(block), Compute{0});
  }

  /// Writes a row of a gradient, or adds the row if gradients are accumulated. May overwrite `sums`.
  void store(const OutputRows<Compute>& gradient, index_t batch, index_t head, index_t row,
             Compute* sums) const {
    if (!head_sums_.has_arrays) return;  // the gradient holds the sums
    const index_t n = gradient.extent(3);
    if (gradient.kind() == ElementKind::compute) {
      const auto put = problem_.accumulates ? gradient_kernels_.add_rows : gradient_kernels_.copy_rows;
      put(sums, 0, 1, n, gradient.in_place(batch, head, row), 0);
      return;
    }
    if (problem_.accumulates) {
      gradient_kernels_.add_rows(gradient.load(batch, head, row, memory_.staged), 0, 1, n, sums, 0);
    }
    gradient.store(batch, head, row, sums);
  }

  void add_keys(index_t block, bool is_first, bool is_last) const {
    const index_t first = block * backward_key_block, count = keys_of(block);
    const auto add_rows = is_first ? gradient_kernels_.copy_rows : gradient_kernels_.add_rows;
    for (const KeySums<Compute>* sums : {&head_sums_.dk, &head_sums_.dv}) {
      Compute* const partial = sums->partial(first);
      add_rows(partial, sums->pitch, count, sums->width, sums->whole(first), sums->stride());
      if (!is_last) std::fill_n(partial, count * sums->pitch, Compute{0});
    }
  }

  const BackwardProblem<Compute>& problem_;
  const Problem<Compute>& forward_;
  const GradientVariant<Compute>& variant_;
  const PrefillBackwardKernels<Compute>& gradient_kernels_;
  const Memory& memory_;
  const BackwardLoader<Compute, Operand> loader_;
  const Multipliers multipliers_;
  BackwardBlock<Compute, Operand> block_;
  CallSums sums_;  // null if the call has no parameter gradients
  bool sums_in_place_ = false;
  HeadSums<Compute, Operand> head_sums_{};
  BackwardSequence sequence_{};
  index_t batch_ = -1, kv_head_ = 0;
  index_t loaded_queries_ = -1;
};

SSMAX_END
