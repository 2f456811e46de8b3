// Makes random queries, keys and values for the benchmarks of attention.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <ssmax/half.hpp>

#include "attention.hpp"

namespace ssmax_bench {

// Returns standard normal numbers. A 16-bit type uses half of a buffer of floats.
inline Buffer normal(ElementType type, index_t size, int stagger, std::uint32_t seed) {
  Buffer floats(size, stagger);
  fill_normal(floats, seed);
  if (type == ElementType::f32) return floats;
  Buffer narrow((size + 1) / 2, stagger);
  for (index_t i = 0; i < size; ++i) {
    const float value = floats.data()[i];
    const std::uint16_t bits =
        type == ElementType::bf16 ? ssmax::bfloat16(value).bits : ssmax::half(value).bits;
    std::memcpy(reinterpret_cast<char*>(narrow.data()) + 2 * i, &bits, sizeof(bits));
  }
  return narrow;
}

// The key of a cache of tensors: all values that determine their sizes and numbers.
using DataKey = std::array<index_t, 7>;

inline DataKey data_key(const AttentionShape& shape, ElementType type) {
  return {shape.heads,
          shape.kv_heads,
          shape.width,
          shape.n,
          shape.queries,
          shape.batch,
          static_cast<index_t>(type)};
}

// The tensors of one shape, made once and shared by all implementations.
class AttentionData {
 public:
  static const AttentionData& of(const AttentionShape& shape, ElementType type) {
    static std::map<DataKey, AttentionData> all;
    const DataKey key = data_key(shape, type);
    const auto found = all.find(key);
    if (found != all.end()) return found->second;
    return all.emplace(key, AttentionData(shape, type)).first->second;
  }

  AttentionArguments arguments(Visibility visibility, int threads) const {
    return {.shape = shape_,
            .visibility = visibility,
            .type = type_,
            .threads = threads,
            .fold = true,
            .q = q_.data(),
            .k = k_.data(),
            .v = v_.data(),
            .out = out_.data()};
  }

 private:
  AttentionData(const AttentionShape& shape, ElementType type)
      : shape_(shape),
        type_(type),
        q_(normal(type, shape.query_size(), 1, 1)),
        k_(normal(type, shape.key_size(), 2, 2)),
        v_(normal(type, shape.key_size(), 3, 3)),
        out_(shape.query_size(), 4) {}

  AttentionShape shape_;
  ElementType type_;
  Buffer q_;
  Buffer k_;
  Buffer v_;
  Buffer out_;
};

}  // namespace ssmax_bench
