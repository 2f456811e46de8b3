// Lists shapes with thousands of short sequences, as in models of tables and images.
#pragma once

#include <string>

#include "attention.hpp"

namespace ssmax_bench {

// The first five shapes are a model of tables on 1,200 rows of 24 columns. In order:
// 1. The columns of a row attend to each other.
// 2. Four summaries attend to the columns of a row.
// 3. Rows attend to 128 inducing points.
// 4. The inducing points attend to rows.
// 5. Rows attend to rows.
inline constexpr AttentionShape short_shapes[] = {
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 24, .queries = 24, .batch = 1200},
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 24, .queries = 4, .batch = 1200},
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 128, .queries = 1200, .batch = 24},
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 1000, .queries = 128, .batch = 24},
    {.heads = 8, .kv_heads = 8, .width = 64, .n = 1000, .queries = 1200, .batch = 1},
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 16, .queries = 16, .batch = 2000},
    {.heads = 8, .kv_heads = 8, .width = 16, .n = 32, .queries = 32, .batch = 1000},
    {.heads = 8, .kv_heads = 8, .width = 32, .n = 64, .queries = 64, .batch = 500}};

inline std::string short_name(const AttentionShape& shape) {
  return std::string("b") + std::to_string(shape.batch) + "_h" + std::to_string(shape.heads) + "_n" +
         std::to_string(shape.queries) + "_m" + std::to_string(shape.n) + "_d" + std::to_string(shape.width) +
         "_f32_t1";
}

// Returns the operations of a call: each of two products has one multiplication and one addition per channel of a logit.
inline double short_operations(const AttentionShape& shape) {
  return 4.0 * static_cast<double>(shape.rows() * shape.n * shape.width);
}

}  // namespace ssmax_bench
