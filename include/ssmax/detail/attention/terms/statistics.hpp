// Defines StatisticsOption, which brings the functions of calls with statistics. Other units do not compile them.
#pragma once

#include <initializer_list>

#include "../../../attention_state.hpp"
#include "../../kernels/prefill.hpp"

SSMAX_BEGIN_SHARED

template <class Compute>
struct ForwardCall;
struct QueryRow;
template <class Compute>
struct Result;

/// The functions of calls with statistics.
template <class Compute>
struct StatisticsFunctions {
  template <class Operand>
  using WeightsKernel = decltype(PrefillKernels<Compute, Operand>::weights);

  /// Throws unless the outputs of the statistics fit the call.
  void (*check)(const char* function, const ForwardCall<Compute>& call);
  /// Return the kernels StatisticsKernels::weights of the active target. Null for a bfloat16 operand of double.
  WeightsKernel<Compute> (*weights)();
  WeightsKernel<bfloat16> (*bf16_weights)();
  /// Returns StatisticsKernels::group of the active target. Null for double.
  const GroupKernels<Compute, bfloat16>& (*bf16_group)();
  /// Writes the statistics of one row of n logits z and weights 2^(unit·z - shift). Replaces z by the weights.
  void (*of_row)(Compute* z, const Compute* weights, index_t n, double unit, double shift,
                 const TileStatistics<Compute>& to);
  /// Writes the whole result of one query and its statistics. Overwrites o. `state_row` is its row in a state.
  void (*store)(const Result<Compute>& result, const QueryRow& seen, index_t state_row,
                const SoftmaxState<Compute>& state, index_t dv);
};

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Compute>
const shared::StatisticsFunctions<Compute>& statistics_functions();

SSMAX_END

SSMAX_BEGIN_SHARED

/// The output of one statistic. The unit that makes it from a view compiles the functions of calls with statistics.
template <class Compute>
class StatisticOutput : public View<Compute, 3> {
  using Base = View<Compute, 3>;

 public:
  using typename Base::Extents;

  SSMAX_INLINE constexpr StatisticOutput() = default;
  SSMAX_INLINE constexpr StatisticOutput(const Base& view)
      : Base(view), functions_(compiled::statistics_functions<Compute>) {}
  SSMAX_INLINE constexpr StatisticOutput(Compute* data, const Extents& extents)
      : StatisticOutput(Base(data, extents)) {}
  SSMAX_INLINE constexpr StatisticOutput(Compute* data, const Extents& extents, const Extents& strides)
      : StatisticOutput(Base(data, extents, strides)) {}

  /// Returns the functions of a call with the statistic, or null if the statistic is left out.
  SSMAX_INLINE const StatisticsFunctions<Compute>* functions() const {
    return this->data_handle() == nullptr ? nullptr : &functions_();
  }

 private:
  const StatisticsFunctions<Compute>& (*functions_)() = nullptr;
};

/// Returns the functions that the first given output brings, or null if all are left out.
template <class Compute>
SSMAX_INLINE const StatisticsFunctions<Compute>* functions_of(
    std::initializer_list<const StatisticOutput<Compute>*> outputs) {
  for (const StatisticOutput<Compute>* output : outputs) {
    if (const auto* functions = output->functions()) return functions;
  }
  return nullptr;
}

/// The statistics of a call: the members of RowStatistics.
template <class Compute>
struct StatisticsOption {
  StatisticOutput<Compute> largest{}, smallest{}, sum_of_squares{}, entropy{};

  SSMAX_INLINE const StatisticsFunctions<Compute>* functions() const {
    return functions_of<Compute>({&largest, &smallest, &sum_of_squares, &entropy});
  }
  SSMAX_INLINE RowStatistics<Compute> views() const { return {largest, smallest, sum_of_squares, entropy}; }
};

/// The state of a call: the members of AttentionState.
template <class Compute>
struct StateOption {
  View<Compute, 3> shift{}, sum{};
  View<Compute, 4> o{};
  StatisticOutput<Compute> largest{}, smallest{}, distances{}, squares{};

  SSMAX_INLINE const StatisticsFunctions<Compute>* functions() const {
    return functions_of<Compute>({&largest, &smallest, &distances, &squares});
  }
  SSMAX_INLINE AttentionState<Compute> views() const {
    return {shift, sum, o, largest, smallest, distances, squares};
  }
};

SSMAX_END
