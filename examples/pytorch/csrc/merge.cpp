// Merges results of attention over two sets of keys.
#include "call.hpp"
#include "operators.hpp"

namespace ssmax_torch {

Results merge(const Tensor& out, const Tensor& lse, const Tensor& other_out, const Tensor& other_lse) {
  return with_type("first out", out, [&]<class T>(std::type_identity<T>) {
    using A = Compute<T>;
    check_rank("first out", out, 4);
    const std::array extents{out.size(0), out.size(1), out.size(2), out.size(3)};
    const auto rows = std::span(extents).first(3);
    check_shape("first lse", lse, rows);
    check_shape("second out", other_out, extents);
    check_shape("second lse", other_lse, rows);
    Results results{.out = new_tensor_like(out, extents), .lse = new_tensor(rows, scalar_type<A>)};
    ssmax::merge<T>({view<const T, 4>("first out", out), view<const A, 3>("first lse", lse)},
                    {view<const T, 4>("second out", other_out), view<const A, 3>("second lse", other_lse)},
                    {view<T, 4>("out", results.out), view<A, 3>("lse", *results.lse)});
    return results;
  });
}

}  // namespace ssmax_torch
