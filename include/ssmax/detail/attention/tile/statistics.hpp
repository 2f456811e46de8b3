// Defines LaneStatistics, the statistics of logits that the kernels do not take.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../rows/state.hpp"

SSMAX_BEGIN_DETAIL

/// The statistics of one query over the keys of one step, added in double.
template <class Compute>
struct LaneStatistics {
  Compute largest = -std::numeric_limits<Compute>::infinity(),
          smallest = std::numeric_limits<Compute>::infinity();
  double distances = 0, squares = 0;

  /// Adds a logit x with its weight 2^(x - shift), unless x is masked or beyond the range of Compute.
  void add(double x, double shift, double weight) {
    if (!(std::abs(x) <= static_cast<double>(std::numeric_limits<Compute>::max()))) return;
    largest = std::max(largest, static_cast<Compute>(x));
    smallest = std::min(smallest, static_cast<Compute>(x));
    if (weight > 0) distances += weight * (x - shift);
    squares += weight * weight;
  }
  /// Adds the statistics of earlier keys, whose weights have the sum `sum`. `factor` = 2^(before - raised) turns these
  /// weights into weights under the raised shift.
  void add_earlier(const TileStatistics<Compute>& earlier, Compute sum, Compute before, Compute raised,
                   Compute factor) {
    largest = std::max(*earlier.largest, largest);
    smallest = std::min(*earlier.smallest, smallest);
    distances =
        move_distances(*earlier.distances, sum, before, raised, factor) + static_cast<Compute>(distances);
    squares = *earlier.squares * factor * factor + static_cast<Compute>(squares);
  }
  void write(const TileStatistics<Compute>& to) const {
    *to.largest = largest;
    *to.smallest = smallest;
    *to.distances = static_cast<Compute>(distances);
    *to.squares = static_cast<Compute>(squares);
  }
};

SSMAX_END
