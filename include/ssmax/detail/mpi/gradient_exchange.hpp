// Gradients of keys on their way home: a rank sends what its queries give a piece to the piece's owner, who adds
// the contributions in a fixed order, its own first, then those of the ranks behind it in turn.
#pragma once

#include <vector>

#include "exchange.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// A contribution lies as a piece of keys does: dk, then dv.
template <class T>
class GradientExchange {
 public:
  /// `buffers` have room for four pieces of `row` elements to a key. The members' add(piece, contribution) adds
  /// to dk and dv.
  GradientExchange(mpi::Communicator& comm, const RingPlan& plan, index_t row, T* buffers)
      : plan_(plan), requests_(comm), row_(row) {
    const index_t size = plan.longest_piece() * row;
    for (int i = 0; i < 2; ++i) {
      outgoing_[i] = buffers + i * size;
      incoming_[i] = buffers + (2 + i) * size;
    }
    const std::vector<Piece>& pieces = plan.pieces();
    own_done_.resize(pieces.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].keys.rank != plan.rank()) continue;
      own_done_[i] = !plan.needs(plan.rank(), pieces[i]);
      for (int j = 1; j < plan.ranks(); ++j) {
        const int from = (plan.rank() + j) % plan.ranks();
        if (plan.needs(from, pieces[i])) expected_.push_back({i, from});
      }
    }
    receive_next(), receive_next();
  }

  /// The owner's own contribution to a piece lies in dk and dv.
  void own_is_done(std::size_t piece) { own_done_[piece] = true; }

  /// Room for a contribution to another rank's piece. Waits until one that was sent has arrived.
  template <class Add>
  T* room(const Add& add) {
    MPI_Request& request = sending_[sent_ % 2];
    requests_.wait([&] {
      poll(add);
      return Requests::test(request);
    });
    return outgoing_[sent_ % 2];
  }
  void send(std::size_t piece) {
    const mpi::Segment& keys = plan_.pieces()[piece].keys;
    sending_[sent_ % 2] = requests_.send(outgoing_[sent_ % 2], size_of(piece), keys.rank, tag(piece));
    ++sent_;
  }

  /// Adds what has arrived and whose turn it is.
  template <class Add>
  void poll(const Add& add) {
    while (taken_ < expected_.size()) {
      const std::size_t piece = expected_[taken_].piece;
      if (!own_done_[piece] || !Requests::test(receiving_[taken_ % 2])) return;
      add(piece, incoming_[taken_ % 2]);
      ++taken_;
      receive_next();
    }
  }
  template <class Add>
  void finish(const Add& add) {
    requests_.wait([&] {
      poll(add);
      return taken_ == expected_.size() && Requests::test(sending_[0]) && Requests::test(sending_[1]);
    });
  }

 private:
  struct Contribution {
    std::size_t piece;
    int from;
  };

  static int tag(std::size_t piece) {
    return 16384 + static_cast<int>(piece % 16383);
  }  // keys have those below
  [[nodiscard]] std::size_t size_of(std::size_t piece) const {
    return static_cast<std::size_t>(plan_.pieces()[piece].keys.size() * row_) * sizeof(T);
  }
  void receive_next() {
    if (asked_ == expected_.size()) return;
    const Contribution& next = expected_[asked_];
    receiving_[asked_ % 2] =
        requests_.receive(incoming_[asked_ % 2], size_of(next.piece), next.from, tag(next.piece));
    ++asked_;
  }

  const RingPlan& plan_;
  Requests requests_;
  index_t row_;
  T *outgoing_[2], *incoming_[2];
  MPI_Request sending_[2]{MPI_REQUEST_NULL, MPI_REQUEST_NULL},
      receiving_[2]{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  std::vector<Contribution> expected_;
  std::vector<bool> own_done_;  // [pieces]
  std::size_t asked_ = 0, taken_ = 0, sent_ = 0;
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
