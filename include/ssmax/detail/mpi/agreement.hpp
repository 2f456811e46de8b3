// Before anything is sent: all ranks must have been called alike, and each with arguments that fit. If not, every
// rank throws the same error.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../mpi_communicator.hpp"
#include "../../mpi_layout.hpp"
#include "../../rope.hpp"
#include "../attention/variant.hpp"

SSMAX_BEGIN
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// FNV-1a, cut to 62 bits so that its negative is a number too.
class Fingerprint {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ at[i]) * 1099511628211ULL;
  }
  template <class Number>
  void add(Number value) {
    add(&value, sizeof(value));
  }
  [[nodiscard]] std::int64_t value() const { return static_cast<std::int64_t>(hash_ >> 2); }

 private:
  std::uint64_t hash_ = 14695981039346656037ULL;
};

/// Numbers that must be the same on all ranks, by name.
class Agreement {
 public:
  explicit Agreement(const char* function) : function_(function) {
    Fingerprint called;
    called.add(function, std::strlen(function));
    add("the function called", called.value());
  }

  void add(const char* name, std::int64_t value) { add_if(true, name, value); }
  /// The same of a rank that may have nothing to say: `agreed` is then what the others say.
  void add_if(bool speaks, const char* name, std::int64_t value) {
    SSMAX_ASSERT(count_ < most);
    names_[count_] = name;
    extremes_[2 * count_] = speaks ? value : silence;
    extremes_[2 * count_ + 1] = speaks ? -value : silence;
    ++count_;
  }
  /// What was added last, once it is settled; 0 if no rank had anything to say.
  [[nodiscard]] std::int64_t last_agreed() const {
    const std::int64_t value = extremes_[2 * (count_ - 1)];
    return value == silence ? 0 : value;
  }

  /// Collective. `complaint` is what this rank's own arguments gave, empty if they fit.
  void settle(const mpi::Communicator& comm, const std::string& complaint) {
    if (!complaint.empty()) extremes_.back() = comm.ranks() - comm.rank();
    check_mpi("MPI_Allreduce",
              MPI_Allreduce(MPI_IN_PLACE, extremes_.data(), static_cast<int>(extremes_.size()), MPI_INT64_T,
                            MPI_MAX, comm.handle()));
    if (extremes_.back() > 0) {
      const int complaining = comm.ranks() - static_cast<int>(extremes_.back());
      std::array<char, 512> text{};
      complaint.copy(text.data(), text.size() - 1);
      check_mpi("MPI_Bcast",
                MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, complaining, comm.handle()));
      fail_format("%s (on rank %d)", text.data(), complaining);
    }
    for (std::size_t i = 0; i < count_; ++i) {
      if (extremes_[2 * i] == silence || extremes_[2 * i] == -extremes_[2 * i + 1]) continue;
      fail_format("ssmax::mpi::%s: %s differs between ranks, from %td to %td", function_, names_[i],
                  static_cast<index_t>(-extremes_[2 * i + 1]), static_cast<index_t>(extremes_[2 * i]));
    }
  }

 private:
  static constexpr std::size_t most = 24;
  static constexpr std::int64_t silence = std::numeric_limits<std::int64_t>::min();
  const char* function_;
  std::array<const char*, most> names_{};
  /// The maximum of x and of -x, a fixed number of them, as ranks may have called different functions; then whose
  /// arguments do not fit.
  std::array<std::int64_t, 2 * most + 1> extremes_{};
  std::size_t count_ = 0;
};

/// What a call throws, if it throws std::invalid_argument.
template <class F>
std::string complaint_of(const F& call) {
#if defined(__cpp_exceptions)
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
#else
  call();
#endif
  return {};
}

inline std::int64_t fingerprint(const mpi::Layout& layout) {
  Fingerprint result;
  result.add(layout.is_by_heads());
  for (const mpi::Segment& segment : layout.segments()) {
    result.add(segment.begin), result.add(segment.end), result.add(segment.rank);
  }
  return result.value();
}

/// Of what the angles are made of.
inline std::int64_t fingerprint(const RopeOptions& options) {
  Fingerprint result;
  const RopeScaling& scaling = options.scaling;
  result.add(options.width), result.add(options.theta), result.add(options.pairing);
  result.add(scaling.method), result.add(scaling.factor), result.add(scaling.original_positions);
  result.add(scaling.low), result.add(scaling.high);
  return result.value();
}

/// What mask, scaling and score say of some queries: the first, the last and some between.
template <class A>
std::int64_t fingerprint(const Variant<A>& variant, const QueryShape& shape) {
  Fingerprint result;
  result.add(variant.has_score), result.add(variant.has_predicate);
  if (shape.rows() == 0) return result.value();
  for (index_t head = 0; head < shape.heads; ++head) {
    for (index_t i = 0; i < 4; ++i) {
      const Query query{0, head, i * (shape.queries - 1) / 3, shape};
      const QueryRow row = variant.row(query, {0, shape.keys});
      result.add(row.keys.begin), result.add(row.keys.end), result.add(row.multiplier), result.add(row.n);
      if (row.keys.size() == 0) continue;
      A logit = 1;
      variant.apply(&logit, {row.keys.begin, row.keys.begin + 1}, row);
      result.add(logit);
    }
  }
  return result.value();
}

/// The type of something, with its name's letters.
template <class... Types>
std::int64_t fingerprint_of_types() {
  Fingerprint result;
#if defined(__GNUC__) || defined(__clang__)
  result.add(__PRETTY_FUNCTION__, sizeof(__PRETTY_FUNCTION__));
#endif
  return result.value();
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
SSMAX_END
