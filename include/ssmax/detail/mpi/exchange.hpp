// Exchanges pieces of keys. Each rank sends its own pieces to every rank that needs them. Each rank receives
// the pieces that it needs in the order of the keys, two pieces ahead.
//
// This order makes results bit-identical to a single-process run: a query's sums add its keys from the first
// to the last. So a piece comes directly from its owner. A ring from neighbour to neighbour would begin in
// the middle of the sequence.
//
// MPI moves messages only inside its own functions. So the code that computes calls poll() between its steps.
#pragma once

#include <cstddef>
#include <vector>

#include "pieces.hpp"
#include "requests.hpp"

SSMAX_BEGIN_DETAIL

/// An exchange of keys as bytes. A piece is k [batch, kv_heads, keys, d], then v [batch, kv_heads, keys, dv].
class KeyExchange {
 public:
  /// `own` holds this rank's pieces, packed one after another, with `row` bytes per key. `incoming` must
  /// have space for two pieces.
  KeyExchange(mpi::Communicator& comm, const Pieces& pieces, index_t row, const std::byte* own,
              std::byte* incoming)
      : pieces_(pieces), requests_(comm), row_(row), own_(own) {
    buffers_[0] = incoming;
    buffers_[1] = incoming + pieces.longest() * row;
    for (const Piece& piece : pieces.list()) {
      if (pieces.needs(pieces.rank(), piece)) steps_.push_back(piece.index);
    }
    receive_next(), receive_next();
    for (const Piece& piece : pieces.list()) {
      if (piece.rank != pieces.rank()) continue;
      // Each rank sends to its next neighbour first, so that ranks do not all send to rank 0 at once.
      for (int j = 1; j < pieces.ranks(); ++j) {
        const int to = (pieces.rank() + j) % pieces.ranks();
        if (pieces.needs(to, piece))
          sends_.add(requests_.send(own_ + piece.row * row_, size_of(piece), to, tag(piece.index)));
      }
    }
  }

  /// Returns the pieces that this rank needs, in the order of the keys, as indices of pieces.list().
  [[nodiscard]] const std::vector<std::size_t>& steps() const { return steps_; }

  /// Returns the keys of the next step and releases the keys of the step before. Calls poll() while it waits.
  template <class Poll>
  const std::byte* next(const Poll& poll) {
    if (step_ > 0 && is_foreign(steps_[step_ - 1])) {
      ++taken_;
      receive_next();
    }
    const std::size_t piece = steps_[step_++];
    if (!is_foreign(piece)) return own_ + pieces_.list()[piece].row * row_;
    MPI_Request& request = incoming_[taken_ % 2];
    requests_.wait([&] {
      poll();
      return Requests::test(request);
    });
    return buffers_[taken_ % 2];
  }

  bool sent() { return sends_.done(); }
  void finish() {
    requests_.wait([&] { return sends_.done(); });
  }

 private:
  // MPI guarantees tags up to 32767. Keys use tags below 8192, sums of gradients use tags from 8192 on.
  static int tag(std::size_t piece) { return static_cast<int>(piece % 8192); }
  [[nodiscard]] std::size_t size_of(const Piece& piece) const {
    return static_cast<std::size_t>(piece.size() * row_);
  }
  [[nodiscard]] bool is_foreign(std::size_t piece) const {
    return pieces_.list()[piece].rank != pieces_.rank();
  }
  void receive_next() {
    while (asked_step_ < steps_.size() && !is_foreign(steps_[asked_step_])) ++asked_step_;
    if (asked_step_ == steps_.size()) return;
    const std::size_t i = steps_[asked_step_++];
    const Piece& piece = pieces_.list()[i];
    incoming_[asked_ % 2] = requests_.receive(buffers_[asked_ % 2], size_of(piece), piece.rank, tag(i));
    ++asked_;
  }

  const Pieces& pieces_;
  Requests requests_;
  index_t row_;
  const std::byte* own_;
  std::byte* buffers_[2];
  MPI_Request incoming_[2]{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  Outgoing sends_;
  std::vector<std::size_t> steps_;
  std::size_t step_ = 0, asked_step_ = 0;  // indices into steps_
  std::size_t asked_ = 0, taken_ = 0;      // numbers of pieces from other ranks
};

SSMAX_END
