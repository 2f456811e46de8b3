// Checks the sinks of attention.
#pragma once

#include <span>

#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `sinks` is empty, or has one number per head and does not overlap the outputs.
template <class A>
void check_sinks(const char* function, std::span<const A> sinks, const AnyView& out, const AnyView& lse) {
  if (sinks.empty()) return;
  const View<const A, 1> view(sinks);
  check_equal(function, "sinks", "has extent", view.extent(0), "heads are", out.extent(1));
  check_no_overlap(function, "out", out, "sinks", view);
  check_no_overlap(function, "lse", lse, "sinks", view);
}

SSMAX_END
