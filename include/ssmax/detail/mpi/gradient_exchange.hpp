// Exchanges sums of dk and dv. A rank sends a sum to the rank that continues it, or to the owner of the keys.
// The owner adds the sums in the order of the queries (sum_order.hpp).
//
// The exchange is deadlock-free:
// - Every rank forms sums in the order of pieces, units and queries.
// - The owner takes the sums in the same order.
// - Sums that a rank begins for another rank come first.
// - A rank has space for more sums than it can begin for other ranks.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "requests.hpp"
#include "sum_order.hpp"

SSMAX_BEGIN_DETAIL

/// The memory of a GradientExchange. A slot has space for a sum of the longest piece and the largest unit.
template <class Compute>
struct SumMemory {
  Compute *outgoing, *incoming;  // [slots] and [2]
  index_t slots, slot_size;
};

/// An exchange of sums of type Compute. A sum has the layout of a piece of keys with the heads of one unit: dk,
/// then dv.
template <class Compute>
class GradientExchange {
 public:
  /// `row` is the number of elements per key of one kv head, in all batch entries. The memory must have space for
  /// more sums than this rank has segments.
  GradientExchange(mpi::Communicator& comm, const SumOrder& order, const std::vector<HeadUnit>& units,
                   index_t row, const SumMemory<Compute>& memory)
      : pieces_(order.pieces()), order_(order), units_(units), requests_(comm), row_(row), memory_(memory) {
    sending_.assign(static_cast<std::size_t>(memory.slots), MPI_REQUEST_NULL);
    for (std::size_t i = 0; i < incoming_.size(); ++i) {
      incoming_[i].sum = memory.incoming + static_cast<index_t>(i) * memory_.slot_size;
    }
    for (const Piece& piece : pieces_.list()) {
      if (piece.rank == pieces_.rank() && !order.senders(piece).empty()) own_.push_back(piece.index);
    }
    receive_next(), receive_next();
  }

  /// Returns the slot for the next sum, with the values that another rank has begun. Waits until a slot is
  /// free. Calls add(piece, unit, sum) for each sum that arrives: `add` must add the sum to dk and dv.
  template <class Add>
  Compute* room(const SumPart& part, std::size_t piece, std::size_t unit, const Add& add) {
    requests_.wait([&] {
      poll(add);
      slot_ = 0;
      while (slot_ < sending_.size() && !is_free(slot_)) ++slot_;
      return slot_ < sending_.size();
    });
    Compute* sum = slot_at(slot_);
    if (part.from >= 0) {
      MPI_Request begun =
          requests_.receive(sum, size_of(piece, unit), part.from, tag_of_segment(part.queries.index));
      wait_for(begun, add);
    }
    return sum;
  }
  /// Sends the sum in the slot that `room` returned. Exception: a finished sum for this rank's own keys stays
  /// in its slot until poll adds it.
  void send(const SumPart& part, std::size_t piece, std::size_t unit) {
    if (part.ends && part.to == pieces_.rank()) {
      staying_.push_back(slot_);
      return;
    }
    sending_[slot_] = requests_.send(slot_at(slot_), size_of(piece, unit), part.to,
                                     part.ends ? tag_of_piece(piece) : tag_of_segment(part.next));
  }

  /// Adds the sums that have arrived, in their order.
  template <class Add>
  void poll(const Add& add) {
    while (taken_ < asked_) {
      Incoming& next = incoming_[taken_ % incoming_.size()];
      if (next.is_own ? staying_.empty() : !Requests::test(next.request)) return;
      add(next.piece, next.unit, next.is_own ? slot_at(staying_.front()) : next.sum);
      if (next.is_own) staying_.pop_front();
      ++taken_;
      receive_next();
    }
  }
  template <class Add>
  void finish(const Add& add) {
    requests_.wait([&] {
      poll(add);
      return taken_ == asked_;
    });
    for (MPI_Request& request : sending_) wait_for(request, add);
  }

 private:
  struct Incoming {
    std::size_t piece = 0, unit = 0;
    bool is_own = false;
    Compute* sum = nullptr;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // Tags may repeat. Sums of one piece arrive in their order, sums that a segment continues in the order of
  // pieces.
  static int tag_of_piece(std::size_t piece) { return 8192 + static_cast<int>(piece % 8192); }
  static int tag_of_segment(std::size_t segment) { return 16384 + static_cast<int>(segment); }
  [[nodiscard]] std::size_t size_of(std::size_t piece, std::size_t unit) const {
    return static_cast<std::size_t>(pieces_.list()[piece].size() * units_[unit].count * row_) *
           sizeof(Compute);
  }
  [[nodiscard]] Compute* slot_at(std::size_t slot) const {
    return memory_.outgoing + static_cast<index_t>(slot) * memory_.slot_size;
  }
  bool is_free(std::size_t slot) {
    return std::ranges::find(staying_, slot) == staying_.end() && Requests::test(sending_[slot]);
  }
  template <class Add>
  void wait_for(MPI_Request& request, const Add& add) {
    requests_.wait([&] {
      poll(add);
      return Requests::test(request);
    });
  }
  void receive_next() {
    if (own_at_ == own_.size()) return;
    const std::size_t piece = own_[own_at_];
    if (senders_.empty()) senders_ = order_.senders(pieces_.list()[piece]);
    Incoming& next = incoming_[asked_++ % incoming_.size()];
    next.piece = piece;
    next.unit = unit_at_;
    const int from = senders_[sender_at_];
    next.is_own = from == pieces_.rank();
    if (!next.is_own) {
      next.request = requests_.receive(next.sum, size_of(piece, unit_at_), from, tag_of_piece(piece));
    }
    if (++sender_at_ < senders_.size()) return;
    sender_at_ = 0;
    if (++unit_at_ < units_.size()) return;
    unit_at_ = 0;
    ++own_at_;
    senders_.clear();
  }

  const Pieces& pieces_;
  const SumOrder& order_;
  const std::vector<HeadUnit>& units_;
  Requests requests_;
  index_t row_;
  SumMemory<Compute> memory_;
  std::vector<MPI_Request> sending_;  // [slots]
  std::deque<std::size_t> staying_;   // slots with sums for own keys, in the order in which poll adds them
  std::array<Incoming, 2> incoming_{};
  std::vector<std::size_t> own_;  // own pieces that some query sees
  std::vector<int> senders_;      // senders of the piece to receive next
  std::size_t own_at_ = 0, unit_at_ = 0, sender_at_ = 0;
  std::size_t slot_ = 0, asked_ = 0, taken_ = 0;
};

SSMAX_END
