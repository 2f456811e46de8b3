// The operators, by the type of the queries.
#include "call.hpp"
#include "operators.hpp"

namespace ssmax_torch {

Extents check_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  check_rank("query", query, 4);
  check_rank("key", key, 4);
  check_rank("value", value, 4);
  const auto q = query.sizes(), k = key.sizes();
  const index_t batch = q[0], heads = q[1], kv_heads = k[1];
  check_shape("key", key, std::array{batch, kv_heads, k[2], q[3]});
  check_shape("value", value, std::array{batch, kv_heads, k[2], value.size(3)});
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    fail("query has " + std::to_string(heads) + " heads, must be a multiple of key's " +
         std::to_string(kv_heads));
  }
  return {batch, heads, q[2], k[2]};
}

Results attention(const Tensor& query, const Tensor& key, const Tensor& value, const Arguments& a,
                  Wanted wanted) {
  return with_type("query", query, [&]<class T>(std::type_identity<T>) {
    return attention_of<T>(query, key, value, a, wanted);
  });
}

Gradients attention_backward(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                             const std::vector<bool>& learn, const Arguments& a) {
  return with_type("query", query, [&]<class T>(std::type_identity<T>) {
    return attention_backward_of<T>({grad_out, grad_lse, query, key, value, out, lse, learn}, a);
  });
}

Results decode(const CacheInputs& in, const Arguments& a, Wanted wanted) {
  return with_type("query", in.query,
                   [&]<class T>(std::type_identity<T>) { return decode_of<T>(in, a, wanted); });
}

}  // namespace ssmax_torch
