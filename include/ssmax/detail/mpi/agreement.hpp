// Checks, before keys, heads or states are sent, that all ranks agree. Every rank compares its arguments with
// the arguments of the other ranks. If arguments differ or one rank's call fails, every rank throws the same
// error.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../../mpi_layout.hpp"
#include "../../rope.hpp"
#include "../attention/desk/user_variant.hpp"

SSMAX_BEGIN_DETAIL

/// A hash of numbers. The value has 62 bits, so that its negative fits std::int64_t as well.
class Fingerprint {
 public:
  template <class... Numbers>
  Fingerprint& add(const Numbers&... numbers) {
    (add_word(numbers), ...);
    return *this;
  }
  Fingerprint& add_bytes(const void* data, std::size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) add_word(at[i]);
    return *this;
  }
  [[nodiscard]] std::int64_t value() const { return static_cast<std::int64_t>(hash_ >> 2); }

 private:
  template <class Number>
  void add_word(Number value) {
    static_assert(sizeof(Number) <= sizeof(std::uint64_t));
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(value));
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15ULL;
    hash_ ^= hash_ >> 32;
  }

  std::uint64_t hash_ = 14695981039346656037ULL;
};

/// Marks an exception that every rank throws.
class IsAgreed {};
template <class Error>
class Agreed : public Error, public IsAgreed {
 public:
  using Error::Error;
};

/// The error of this rank's part of a call.
struct Complaint {
  enum Kind { none, argument, other };
  Kind kind = none;
  std::array<char, 512> text{};

  /// `function` precedes the text unless the text begins with the library's name.
  Complaint(Kind a_kind, const char* function, const char* error) : kind(a_kind) {
    const bool has_name = std::strncmp(error, "ssmax::", 7) == 0;
    std::snprintf(text.data(), text.size(), "%s%s%s%s", has_name ? "" : "ssmax::", has_name ? "" : function,
                  has_name ? "" : ": ", error);
  }
  Complaint() = default;
};

/// Calls `call` and returns its error. Throws an error that every rank throws.
template <class F>
Complaint complaint_of(const char* function, const F& call) {
#if defined(__cpp_exceptions)
  try {
    call();
  } catch (const IsAgreed&) {
    throw;
  } catch (const std::invalid_argument& error) {
    return {Complaint::argument, function, error.what()};
  } catch (const std::exception& error) {
    return {Complaint::other, function, error.what()};
  } catch (...) {
    return {Complaint::other, function, "an exception that is not a std::exception"};
  }
#else
  (void)function;
  call();
#endif
  return {};
}

/// Returns the contribution of a rank to a maximum that finds the first rank with an error.
inline std::int64_t claim_of(const mpi::Communicator& comm, const Complaint& complaint) {
  return complaint.kind == Complaint::none ? 0 : comm.ranks() - comm.rank();
}

/// Collective. `claim` is the maximum of all ranks' claims. If it is above 0, throws the error of that rank:
/// std::invalid_argument or, for errors of other types, std::runtime_error.
inline void throw_claimed(const mpi::Communicator& comm, std::int64_t claim, Complaint complaint) {
  if (claim <= 0) return;
  const int rank = comm.ranks() - static_cast<int>(claim);
  check_mpi("MPI_Bcast", MPI_Bcast(&complaint, sizeof(complaint), MPI_BYTE, rank, comm.handle()));
  char message[640];
  std::snprintf(message, sizeof(message), "%s (on rank %d)", complaint.text.data(), rank);
#if defined(__cpp_exceptions)
  if (complaint.kind == Complaint::other) throw Agreed<std::runtime_error>(message);
  throw Agreed<std::invalid_argument>(message);
#else
  fail(message);
#endif
}

/// Collective. Every rank throws if one rank has an error.
inline void agree(const mpi::Communicator& comm, const Complaint& complaint) {
  std::int64_t claim = claim_of(comm, complaint);
  check_mpi("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, &claim, 1, MPI_INT64_T, MPI_MAX, comm.handle()));
  throw_claimed(comm, claim, complaint);
}

/// Calls `call`, during which ranks wait for each other's messages. An error on one rank would leave the
/// other ranks waiting, so the function prints the error and aborts all ranks. Exception: an Agreed error, because
/// every rank has it.
template <class F>
void exchange_or_abort(const mpi::Communicator& comm, const char* function, const F& call) {
  const Complaint complaint = complaint_of(function, call);
  if (complaint.kind == Complaint::none) return;
  std::fprintf(stderr, "%s (on rank %d, during the exchange: MPI_Abort ends all ranks)\n",
               complaint.text.data(), comm.rank());
  std::fflush(stderr);
  MPI_Abort(comm.handle(), 1);
  std::abort();
}

/// A list of named numbers that must be the same on all ranks.
class Agreement {
 public:
  explicit Agreement(const char* function) : function_(function) {
    add("the function called", Fingerprint().add_bytes(function, std::strlen(function)).value());
  }

  void add(const char* name, std::int64_t value) { add_if(true, name, value); }
  /// Adds a number that only some ranks have. A rank with `speaks` false does not contribute: last_agreed
  /// returns the number of the other ranks.
  void add_if(bool speaks, const char* name, std::int64_t value) {
    if (count_ == most)
      fail_value(function_, "the number of arguments", "that ranks compare is",
                 static_cast<index_t>(most) + 1, "must be at most", static_cast<index_t>(most));
    names_[count_] = name;
    extremes_[2 * count_] = speaks ? value : silence;
    extremes_[2 * count_ + 1] = speaks ? -value : silence;
    ++count_;
  }
  /// Returns the number that was added last, or 0 if no rank contributed it. Call settle first.
  [[nodiscard]] std::int64_t last_agreed() const {
    const std::int64_t value = extremes_[2 * (count_ - 1)];
    return value == silence ? 0 : value;
  }

  /// Collective. Throws if a number differs between ranks. `complaint` is the error of this rank's own
  /// arguments: every rank throws the first rank's error.
  void settle(const mpi::Communicator& comm, const Complaint& complaint) {
    extremes_.back() = claim_of(comm, complaint);
    check_mpi("MPI_Allreduce",
              MPI_Allreduce(MPI_IN_PLACE, extremes_.data(), static_cast<int>(extremes_.size()), MPI_INT64_T,
                            MPI_MAX, comm.handle()));
    throw_claimed(comm, extremes_.back(), complaint);
    for (std::size_t i = 0; i < count_; ++i) {
      if (extremes_[2 * i] == silence || extremes_[2 * i] == -extremes_[2 * i + 1]) continue;
      fail_format("ssmax::%s: %s differs between ranks, from %td to %td", function_, names_[i],
                  static_cast<index_t>(-extremes_[2 * i + 1]), static_cast<index_t>(extremes_[2 * i]));
    }
  }

 private:
  static constexpr std::size_t most = 32;
  static constexpr std::int64_t silence = std::numeric_limits<std::int64_t>::min();
  const char* function_;
  std::array<const char*, most> names_{};
  /// The maxima of x and of -x for each number, then the maximum of claims. The length is fixed, because
  /// ranks may have called different functions.
  std::array<std::int64_t, 2 * most + 1> extremes_{};
  std::size_t count_ = 0;
};

inline std::int64_t fingerprint(const mpi::Layout& layout) {
  Fingerprint result;
  result.add(layout.is_by_heads());
  for (const mpi::Segment& segment : layout.segments()) {
    result.add(segment.begin, segment.end, segment.rank);
  }
  return result.value();
}

/// Returns a hash of all that determines the rotation of a row, and of the range of the tables: a rank checks the range
/// for its own positions only, but may read all. Exception: the hash does not cover positions on several axes.
template <class T>
std::int64_t fingerprint(const Rope<T>& rope) {
  const RopeOptions options = rope.options();
  const RopeScaling& scaling = options.scaling;
  Fingerprint result;
  result.add(options.width, options.theta, options.pairing, scaling.method, scaling.factor)
      .add(scaling.original_positions, scaling.low, scaling.high, scaling.truncate)
      .add(options.first_channel, options.attention_factor);
  for (double omega : options.frequencies) result.add(omega);
  for (index_t axis : rope.axes()) result.add(axis);
  return result.add(rope.sequences(), rope.first_position(), rope.positions()).value();
}

/// Calls f(query) for every query of every batch entry and head.
template <class F>
void for_each_query(const QueryShape& shape, const F& f) {
  for (Query query{0, 0, 0, shape}; query.batch < shape.batch; ++query.batch) {
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      for (query.index = 0; query.index < shape.queries; ++query.index) f(std::as_const(query));
    }
  }
}

/// Returns variant.row(query) for a mask that has `sees`. Adds the runs of the mask to the hash. Exception: for a
/// mask without `run`, adds one bit per key of the range and counts the bits, so that `sees` is called once per
/// key.
template <class V>
QueryRow add_visible(Fingerprint& to, const V& variant, const Query& query) {
  QueryRow row{.query = query, .keys = visible_keys(variant.mask, query)};
  if constexpr (has_run<std::remove_cvref_t<decltype(variant.mask)>>) {
    for_each_visible_run(variant.mask, query, row.keys, [&](KeyRange run) { to.add(run.begin, run.end); });
    row.n = visible_count(variant.mask, query, row.keys);
  } else {
    for (index_t key = row.keys.begin; key < row.keys.end;) {
      const index_t end = std::min(row.keys.end, key + 64);
      std::uint64_t bits = 0;
      for (; key < end; ++key) bits = bits << 1 | static_cast<std::uint64_t>(sees(variant.mask, query, key));
      to.add(bits);
      row.n += std::popcount(bits);
    }
  }
  if (row.n == 0) return {.query = query};
  row.multiplier = static_cast<double>(variant.scaling(
      PlacedRow{{query.head, row_position(variant.mask, query), row.n}, query.batch, query.index}));
  return row;
}

/// Adds the policies of one query:
/// - its range of keys, position, n and c,
/// - the visible keys if the mask has `sees`,
/// - the score of a logit at three keys: the first, the last, and one that varies with the query.
template <class Compute, class V>
void add_query(Fingerprint& to, const V& variant, const Query& query) {
  QueryRow row;
  if constexpr (has_predicate<std::remove_cvref_t<decltype(variant.mask)>>) {
    row = add_visible(to, variant, query);
  } else {
    row = variant.row(query, {0, query.shape.keys});
  }
  to.add(row.keys.begin, row.keys.end, row.n, row_position(variant.mask, query), row.multiplier,
         variant.query_position(query));
  if (!variant.has_score || row.keys.size() == 0) return;
  const auto varying = static_cast<index_t>(static_cast<std::uint64_t>(query.index) * 2654435761U %
                                            static_cast<std::uint64_t>(row.keys.size()));
  for (const index_t key : {row.keys.begin, row.keys.end - 1, row.keys.begin + varying}) {
    Compute logit = 1;
    variant.apply(&logit, {key, key + 1}, row);
    to.add(logit);
  }
}

/// Returns a hash of the kinds of policies, and of the positions of keys if the mask defines positions.
template <class V>
Fingerprint fingerprint_of_keys(const V& variant, const QueryShape& shape, index_t kv_heads) {
  Fingerprint result;
  result.add(variant.has_score, variant.has_predicate);
  if (variant.has_positions) {
    const index_t group = std::max<index_t>(1, shape.heads / std::max<index_t>(1, kv_heads));
    for (Query query{0, 0, 0, shape}; query.batch < shape.batch; ++query.batch) {
      for (query.head = 0; query.head < shape.heads; query.head += group) {
        for (index_t key = 0; key < shape.keys; ++key) result.add(variant.key_position(query, key));
      }
    }
  }
  return result;
}

/// Returns a hash of the policies of every query.
template <class Compute, class V>
std::int64_t fingerprint_of_all(const V& variant, const QueryShape& shape, index_t kv_heads) {
  Fingerprint result = fingerprint_of_keys(variant, shape, kv_heads);
  for_each_query(shape, [&](const Query& query) { add_query<Compute>(result, variant, query); });
  return result.value();
}

/// Returns a hash of the policies of every query, before queries are divided among ranks. Exception: with
/// `sees`, a query costs O(keys). The hash then covers the positions of keys only, and compare_by_neighbours
/// compares the queries.
template <class Compute, class V>
std::int64_t fingerprint_of_ranges(const V& variant, const QueryShape& shape, index_t kv_heads) {
  return variant.has_predicate ? fingerprint_of_keys(variant, shape, kv_heads).value()
                               : fingerprint_of_all<Compute>(variant, shape, kv_heads);
}

/// Collective. Requires a mask that has `sees`. Each rank compares its policies with the policies of the rank
/// before it, for the queries that it computes. rank_of(query) returns the rank that computes a query.
template <class Compute, class V, class RankOf>
void compare_by_neighbours(const mpi::Communicator& comm, const char* function, const V& variant,
                           const QueryShape& shape, const RankOf& rank_of) {
  const int ranks = comm.ranks(), next = (comm.rank() + 1) % ranks,
            before = (comm.rank() + ranks - 1) % ranks;
  Fingerprint own, of_next;
  Complaint complaint = complaint_of(function, [&] {
    for_each_query(shape, [&](const Query& query) {
      const int rank = rank_of(query);
      if (rank == comm.rank()) {
        add_query<Compute>(own, variant, query);
      } else if (rank == next) {
        add_query<Compute>(of_next, variant, query);
      }
    });
  });
  agree(comm, complaint);
  const std::int64_t sent = of_next.value();
  std::int64_t received = 0;
  check_mpi("MPI_Sendrecv", MPI_Sendrecv(&sent, 1, MPI_INT64_T, next, 0, &received, 1, MPI_INT64_T, before, 0,
                                         comm.handle(), MPI_STATUS_IGNORE));
  if (received != own.value()) {
    char text[128];
    std::snprintf(text, sizeof(text), "scaling, mask or score differs between ranks %d and %d", before,
                  comm.rank());
    complaint = {Complaint::argument, function, text};
  }
  agree(comm, complaint);
}

/// Returns a hash of the names of types. Exception: returns a constant for compilers other than GCC and
/// Clang.
template <class... Types>
std::int64_t fingerprint_of_types() {
#if defined(__GNUC__) || defined(__clang__)
  return Fingerprint().add_bytes(__PRETTY_FUNCTION__, sizeof(__PRETTY_FUNCTION__)).value();
#else
  return 0;
#endif
}

SSMAX_END
