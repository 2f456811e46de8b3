// The options of a call as one value, which test helpers pass on and add to the arguments of a call.
#pragma once

#include <ssmax/mpi_arguments.hpp>

#include "call.hpp"

namespace ssmax {

using mpi::AttentionOptions;

/// Returns the arguments of a call with options.
template <class T>
AttentionArguments<detail::ComputeType<T>> with(AttentionArguments<detail::ComputeType<T>> a,
                                                const AttentionOptions<T>& options) {
  detail::copy_options(a, options);
  return a;
}
template <class T>
BackwardArguments<detail::ComputeType<T>> backward_with(BackwardArguments<detail::ComputeType<T>> a,
                                                        const AttentionOptions<T>& options) {
  detail::copy_options(a, options);
  return a;
}

/// Returns the arguments of a call over a source.
template <class A, class K>
AttentionArguments<A> over(AttentionArguments<A> a, const K& source) {
  a.keys = source;
  return a;
}

template <class T, class K>
AttentionArguments<detail::ComputeType<T>> over(const mpi::DecodeArguments<T>& a, const K& source) {
  return over(detail::as_one_process(a, AttentionOptions<T>()), source);
}

}  // namespace ssmax
