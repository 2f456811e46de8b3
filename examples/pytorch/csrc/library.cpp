// The operators' schemas, and their registration by PyTorch's stable ABI.
#include <stdexcept>
#include <string>

#include "messages.hpp"
#include "operators.hpp"

namespace ssmax_torch {
namespace {

// Scaling, mask, score and options: struct Arguments, in its order. PyTorch converts every argument of a schema in
// every call, also a default. So attention_forward has the common arguments only.
#define SSMAX_TORCH_COMMON                                                                         \
  "float? scale=None, bool causal=False, int scaling=0, Tensor? s=None, Tensor? b=None, float[]? " \
  "numbers=None, int[]? size=None"
#define SSMAX_TORCH_ROPE "Tensor? rope_positions=None, int[]? rope_axes=None"
#define SSMAX_TORCH_ARGUMENTS                                                                               \
  SSMAX_TORCH_COMMON                                                                                        \
  ", Tensor? p=None, Tensor? c=None, int[]? window=None, int? chunk=None, bool top_left=False, "            \
  "Tensor? left_padding=None, Tensor? prefix=None, Tensor? lengths=None, Tensor? cu_queries=None, Tensor? " \
  "cu_keys=None, "                                                                                          \
  "Tensor? visible=None, bool visible_modulo=False, float? softcap=None, float? scale_invariant=None, "     \
  "Tensor? slopes=None, "                                                                                   \
  "int slopes_multiply=0, Tensor? bias=None, bool bias_modulo=False, bool bias_hides=False, Tensor? "       \
  "sinks=None, "                                                                                            \
  "bool scaled_sinks=False, float[]? rope=None, " SSMAX_TORCH_ROPE                                          \
  ", float? dropout_p=None, Tensor? dropout_seed=None, "                                                    \
  "int dropout_offset=0"
#define SSMAX_TORCH_CACHE "Tensor query, Tensor keys, Tensor values, Tensor lengths_of_cache, bool ring, "
#define SSMAX_TORCH_CROSS_ENTROPY                                                           \
  "Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, " \
  "float softcap, float z_loss"

/// Takes an operator's arguments from the stack, one after the other, and leaves its results there.
class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) {}

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(values_[next_++]);
  }
  /// Nothing, or 0, for None.
  template <class T>
  T take_or_empty() {
    return take<std::optional<T>>().value_or(T{});
  }
  Arguments take_arguments() {
    Arguments a = take_common_arguments();
    a.p = take<MaybeTensor>();
    a.c = take<MaybeTensor>();
    a.window = take_or_empty<std::vector<std::int64_t>>();
    a.chunk = take<std::optional<std::int64_t>>();
    a.top_left = take<bool>();
    a.left_padding = take<MaybeTensor>();
    a.prefix = take<MaybeTensor>();
    a.lengths = take<MaybeTensor>();
    a.cu_queries = take<MaybeTensor>();
    a.cu_keys = take<MaybeTensor>();
    a.visible = take<MaybeTensor>();
    a.visible_modulo = take<bool>();
    a.softcap = take_or_empty<double>();
    a.scale_invariant = take_or_empty<double>();
    a.slopes = take<MaybeTensor>();
    a.slopes_multiply = static_cast<SlopesMultiply>(take<std::int64_t>());
    a.bias = take<MaybeTensor>();
    a.bias_modulo = take<bool>();
    a.bias_hides = take<bool>();
    a.sinks = take<MaybeTensor>();
    a.scaled_sinks = take<bool>();
    a.rope.numbers = take_or_empty<std::vector<double>>();
    take_positions(a.rope);
    a.dropout_p = take_or_empty<double>();
    a.dropout_seed = take<MaybeTensor>();
    a.dropout_offset = take<std::int64_t>();
    return a;
  }
  Arguments take_common_arguments() {
    Arguments a{};
    a.scale = take<std::optional<double>>();
    a.causal = take<bool>();
    a.scaling = static_cast<ScalingKind>(take<std::int64_t>());
    a.s = take<MaybeTensor>();
    a.b = take<MaybeTensor>();
    a.numbers = take_or_empty<std::vector<double>>();
    a.size = take_or_empty<std::vector<std::int64_t>>();
    return a;
  }
  void take_positions(RopeInputs& rope) {
    rope.positions = take<MaybeTensor>();
    rope.axes = take_or_empty<std::vector<std::int64_t>>();
  }
  CrossEntropyInputs take_cross_entropy_inputs() {
    return {.logits = take<Tensor>(),
            .target = take<Tensor>(),
            .weight = take<MaybeTensor>(),
            .ignore_index = take<std::int64_t>(),
            .label_smoothing = take<double>(),
            .softcap = take<double>(),
            .z_loss = take<double>()};
  }
  void put(std::size_t i, const auto& tensor) { values_[i] = torch::stable::detail::from(tensor); }
  /// Requires lse.
  void put(const Results& results) {
    put(0, results.out);
    put(1, *results.lse);
    for (std::size_t i = 0; i < results.statistics.size(); ++i) put(2 + i, results.statistics[i]);
  }

 private:
  StableIValue* values_;
  std::size_t next_ = 0;
};

void boxed_attention(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto query = stack.take<Tensor>(), key = stack.take<Tensor>(), value = stack.take<Tensor>();
  stack.put(attention(query, key, value, stack.take_arguments(), Wanted::lse));
}

void boxed_attention_statistics(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto query = stack.take<Tensor>(), key = stack.take<Tensor>(), value = stack.take<Tensor>();
  stack.put(attention(query, key, value, stack.take_arguments(), Wanted::statistics));
}

void boxed_attention_forward(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const bool with_lse = stack.take<bool>();
  const auto query = stack.take<Tensor>(), key = stack.take<Tensor>(), value = stack.take<Tensor>();
  const Results results =
      attention(query, key, value, stack.take_common_arguments(), with_lse ? Wanted::lse : Wanted::out);
  stack.put(0, results.out);
  stack.put(1, results.lse);
}

void boxed_count_within_gaps(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto query = stack.take<Tensor>(), key = stack.take<Tensor>();
  const auto gaps = stack.take<std::vector<double>>();
  const auto [largest, counts] = count_within_gaps(query, key, gaps, stack.take_arguments());
  stack.put(0, largest);
  stack.put(1, counts);
}

void boxed_attention_backward(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto grad_out = stack.take<Tensor>();
  const auto grad_lse = stack.take<MaybeTensor>();
  const auto query = stack.take<Tensor>(), key = stack.take<Tensor>(), value = stack.take<Tensor>(),
             out = stack.take<Tensor>(), lse = stack.take<Tensor>();
  const auto learn = stack.take<std::vector<bool>>();
  const Arguments a = stack.take_arguments();
  const Gradients gradients = attention_backward(grad_out, grad_lse, query, key, value, out, lse, learn, a);
  for (std::size_t i = 0; i < gradients.size(); ++i) stack.put(i, gradients[i]);
}

template <Wanted wanted>
void boxed_decode(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto query = stack.take<Tensor>(), keys = stack.take<Tensor>(), held = stack.take<Tensor>(),
             lengths = stack.take<Tensor>();
  const bool ring = stack.take<bool>();
  stack.put(decode({query, keys, held, lengths, ring}, stack.take_arguments(), wanted));
}

void boxed_rotate(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto rows = stack.take<Tensor>();
  RopeInputs rope{.numbers = stack.take<std::vector<double>>()};
  const auto start = stack.take<std::int64_t>();
  stack.take_positions(rope);
  stack.put(0, rotate(rows, rope, start));
}

template <RowFunction function>
void boxed_rows(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto logits = stack.take<Tensor>();
  stack.put(0, rows<function>(logits, stack.take<MaybeTensor>()));
}

template <RowFunction function>
void boxed_rows_backward(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto grad_out = stack.take<Tensor>(), out = stack.take<Tensor>();
  stack.put(0, rows_backward<function>(grad_out, out, stack.take<MaybeTensor>()));
}

void boxed_merge(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto out = stack.take<Tensor>(), lse = stack.take<Tensor>(), other_out = stack.take<Tensor>(),
             other_lse = stack.take<Tensor>();
  stack.put(merge(out, lse, other_out, other_lse));
}

void boxed_cross_entropy(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto [loss, losses] = cross_entropy(stack.take_cross_entropy_inputs());
  stack.put(0, loss);
  stack.put(1, losses);
}

void boxed_cross_entropy_backward(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  const auto grad_loss = stack.take<Tensor>(), grad_losses = stack.take<Tensor>();
  stack.put(0, cross_entropy_backward(grad_loss, grad_losses, stack.take_cross_entropy_inputs()));
}

constexpr char attention_name[] = "attention", decode_name[] = "KVCache.decode",
               cross_entropy_name[] = "cross_entropy", count_within_gaps_name[] = "count_within_gaps",
               softmax_name[] = "softmax", log_softmax_name[] = "log_softmax", sparsemax_name[] = "sparsemax",
               entmax15_name[] = "entmax15", merge_name[] = "merge";

/// An operator whose messages have the names of the Python package.
template <void (*Boxed)(StableIValue*, std::uint64_t, std::uint64_t), const char* Attention = attention_name>
void named(StableIValue* values, std::uint64_t arguments, std::uint64_t results) {
  try {
    Boxed(values, arguments, results);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(python_message(error.what(), Attention));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(ssmax, library) {
  library.def("attention(Tensor query, Tensor key, Tensor value, " SSMAX_TORCH_ARGUMENTS
              ") -> (Tensor, Tensor)");
  library.def("attention_forward(bool with_lse, Tensor query, Tensor key, Tensor value, " SSMAX_TORCH_COMMON
              ") -> (Tensor, Tensor?)");
  library.def("attention_statistics(Tensor query, Tensor key, Tensor value, " SSMAX_TORCH_ARGUMENTS
              ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("count_within_gaps(Tensor query, Tensor key, float[] gaps, " SSMAX_TORCH_ARGUMENTS
              ") -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor lse, bool[] learn, " SSMAX_TORCH_ARGUMENTS
      ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("decode(" SSMAX_TORCH_CACHE SSMAX_TORCH_ARGUMENTS ") -> (Tensor, Tensor)");
  library.def("decode_statistics(" SSMAX_TORCH_CACHE SSMAX_TORCH_ARGUMENTS
              ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("rotate(Tensor rows, float[] rope, int start, " SSMAX_TORCH_ROPE ") -> Tensor");
  for (const char* function : {softmax_name, log_softmax_name, sparsemax_name, entmax15_name}) {
    const std::string name = function;
    library.def((name + "(Tensor logits, Tensor? begins) -> Tensor").c_str());
    library.def((name + "_backward(Tensor grad_out, Tensor out, Tensor? begins) -> Tensor").c_str());
  }
  library.def("merge(Tensor out, Tensor lse, Tensor other_out, Tensor other_lse) -> (Tensor, Tensor)");
  library.def("cross_entropy(" SSMAX_TORCH_CROSS_ENTROPY ") -> (Tensor, Tensor)");
  library.def("cross_entropy_backward(Tensor grad_loss, Tensor grad_losses, " SSMAX_TORCH_CROSS_ENTROPY
              ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ssmax, CPU, library) {
  library.impl("attention", named<boxed_attention>);
  library.impl("attention_forward", named<boxed_attention_forward>);
  library.impl("attention_statistics", named<boxed_attention_statistics>);
  library.impl("count_within_gaps", named<boxed_count_within_gaps, count_within_gaps_name>);
  library.impl("attention_backward", named<boxed_attention_backward>);
  library.impl("decode", named<boxed_decode<Wanted::lse>, decode_name>);
  library.impl("decode_statistics", named<boxed_decode<Wanted::statistics>, decode_name>);
  library.impl("rotate", named<boxed_rotate>);
  using enum RowFunction;
  library.impl("softmax", named<boxed_rows<softmax>, softmax_name>);
  library.impl("log_softmax", named<boxed_rows<log_softmax>, log_softmax_name>);
  library.impl("sparsemax", named<boxed_rows<sparsemax>, sparsemax_name>);
  library.impl("entmax15", named<boxed_rows<entmax15>, entmax15_name>);
  library.impl("softmax_backward", named<boxed_rows_backward<softmax>, softmax_name>);
  library.impl("log_softmax_backward", named<boxed_rows_backward<log_softmax>, log_softmax_name>);
  library.impl("sparsemax_backward", named<boxed_rows_backward<sparsemax>, sparsemax_name>);
  library.impl("entmax15_backward", named<boxed_rows_backward<entmax15>, entmax15_name>);
  library.impl("merge", named<boxed_merge, merge_name>);
  library.impl("cross_entropy", named<boxed_cross_entropy, cross_entropy_name>);
  library.impl("cross_entropy_backward", named<boxed_cross_entropy_backward, cross_entropy_name>);
}

}  // namespace ssmax_torch
