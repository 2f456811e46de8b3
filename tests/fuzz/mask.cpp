#include "mask.hpp"

#include <functional>
#include <limits>

#include "element.hpp"
#include "user_types.hpp"

namespace fuzz {
namespace {

using ssmax::View;

using Sees = std::function<bool(const Query&, index_t key)>;

/// One part of a mask's definition, with p the key that the query stands at.
struct Definition {
  Sees sees = [](const Query&, index_t) { return true; };
  std::function<index_t(const Query&)> query_position, key_stood_at;
  std::function<index_t(const Query&, index_t)> key_position;
};

index_t standing(const Query& q) { return q.index + q.shape.keys - q.shape.queries; }

std::shared_ptr<std::vector<index_t>> lengths(Random& random, index_t count, index_t keys) {
  auto result = std::make_shared<std::vector<index_t>>();
  for (index_t i = 0; i < count; ++i) {
    result->push_back(random.chance(0.1) ? random.pick<index_t>({-1, 0, keys, keys + 3})
                                         : random.between(0, keys));
  }
  return result;
}

std::size_t document_of(const std::vector<index_t>& bounds, index_t index) {
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    if (index >= bounds[i] && index < bounds[i + 1]) return i;
  }
  return 0;
}

struct TwoBounds {
  std::vector<index_t> queries, keys;
};

struct Matrix {
  std::unique_ptr<bool[]> shown;
  std::vector<float> added;
  std::array<index_t, 4> extents{}, strides{};
  MatrixHeads heads;

  template <class T>
  ssmax::MatrixMask<T> mask(const T* first) const {
    return ssmax::MatrixMask(View<const T, 4>(first, extents, strides), heads.kind);
  }
};

}  // namespace

MatrixHeads draw_matrix_heads(Random& random, index_t heads) {
  if (heads < 1 || random.chance(0.5)) return {heads};
  std::vector<index_t> counts;
  for (index_t count = 1; count <= heads; ++count) {
    if (heads % count == 0) counts.push_back(count);
  }
  // A single matrix is the same for all heads.
  const index_t last = std::ssize(counts) - 1, first = random.chance(0.2) ? 0 : std::min<index_t>(1, last);
  return {counts[static_cast<std::size_t>(random.between(first, last))], ssmax::HeadsOfMatrix::modulo};
}

std::vector<index_t> draw_bounds(Random& random, index_t documents, index_t extent) {
  std::vector<index_t> result{0};
  for (index_t i = 1; i < documents; ++i) result.push_back(random.between(0, extent));
  result.push_back(extent);
  std::sort(result.begin(), result.end());
  return result;
}

DrawnMask draw_mask(Random& random, QueryShape shape, const std::vector<index_t>& keys,
                    const MaskNeeds& needs) {
  DrawnMask drawn;
  drawn.shape = shape;
  drawn.keys = keys;
  bool same_keys = true;
  for (const index_t of_entry : keys) same_keys = same_keys && of_entry == shape.keys;
  Definition definition;

  const auto window = [&] {
    const index_t most = std::max<index_t>(shape.keys, 1);
    index_t left = random.chance(0.1) ? std::numeric_limits<index_t>::max() : random.between(0, most);
    if (needs.ring > 0) left = random.between(0, std::max<index_t>(needs.ring - shape.queries, 0));
    const index_t right = random.chance(0.5)   ? 0
                          : random.chance(0.1) ? std::numeric_limits<index_t>::max()
                                               : random.between(0, most);
    drawn.words += "SlidingWindow(" + std::to_string(left) + ", " + std::to_string(right) + ")";
    return ssmax::SlidingWindow(left, right);
  };
  const auto in_window = [](ssmax::SlidingWindow<> w, index_t p, index_t key) {
    return (key >= p || p - key <= w.left) && (key <= p || key - p <= w.right);
  };
  const auto matrix = [&] {
    auto result = std::make_shared<Matrix>();
    const bool broadcast[] = {random.chance(0.2), random.chance(0.2), random.chance(0.1),
                              random.chance(0.05)};
    result->heads = draw_matrix_heads(random, shape.heads);
    result->extents = {shape.batch, result->heads.count, shape.queries, shape.keys};
    index_t stride = 1;
    for (std::size_t i = 4; i-- > 0;) {
      if (broadcast[i]) continue;
      result->strides[i] = stride;
      stride *= std::max<index_t>(result->extents[i], 1);
    }
    result->shown = std::make_unique<bool[]>(static_cast<std::size_t>(stride));
    const double share = random.pick({0.1, 0.5, 0.9});
    for (index_t i = 0; i < stride; ++i) {
      const bool shown = random.chance(share);
      result->shown[static_cast<std::size_t>(i)] = shown;
      result->added.push_back(shown ? static_cast<float>(random.normal())
                                    : -std::numeric_limits<float>::infinity());
    }
    return result;
  };
  const auto matrix_sees = [](const std::shared_ptr<Matrix>& m) -> Sees {
    return [m](const Query& q, index_t key) {
      const auto& s = m->strides;
      const index_t head = q.head % m->heads.count;
      return m->shown[static_cast<std::size_t>(q.batch * s[0] + head * s[1] + q.index * s[2] + key * s[3])];
    };
  };
  const auto documents = [&](bool causal) {
    auto two = std::make_shared<TwoBounds>();
    const index_t count = random.between(1, 4);
    two->keys = draw_bounds(random, count, shape.keys);
    const bool alike = shape.queries == shape.keys && random.chance(0.6);
    two->queries = alike ? two->keys : draw_bounds(random, count, shape.queries);
    const auto at = [two](const Query& q) {
      const std::size_t d = document_of(two->queries, q.index);
      return two->keys[d + 1] - 1 - (two->queries[d + 1] - 1 - q.index);
    };
    definition.sees = [two, at, causal](const Query& q, index_t key) {
      const std::size_t d = document_of(two->queries, q.index);
      return key >= two->keys[d] && key < two->keys[d + 1] && (!causal || key <= at(q));
    };
    definition.key_stood_at = at;
    definition.query_position = [two, at](const Query& q) {
      return at(q) - two->keys[document_of(two->queries, q.index)];
    };
    definition.key_position = [two](const Query&, index_t key) {
      return key - two->keys[document_of(two->keys, key)];
    };
    drawn.words += std::string("Documents(queries");
    for (const index_t bound : two->queries) drawn.words += " " + std::to_string(bound);
    drawn.words += ", keys";
    for (const index_t bound : two->keys) drawn.words += " " + std::to_string(bound);
    drawn.words += causal ? ", causal)" : ")";
    const bool one = alike && random.chance(0.5);
    return std::pair(
        one ? ssmax::Documents(two->keys, causal) : ssmax::Documents(two->queries, two->keys, causal), two);
  };
  const auto causal_sees = [](const Query& q, index_t key) { return key <= standing(q); };

  const auto choose = [&]() -> int {
    if (needs.ring > 0) return 3;
    for (;;) {
      const auto kind = static_cast<int>(random.between(0, 17));
      if (needs.ranges_only && kind >= 10 && kind < 16) continue;
      if (!same_keys && (kind == 6 || kind == 7 || kind == 10 || kind == 11 || kind == 13 || kind == 15))
        continue;
      if (!same_keys && kind == 2) continue;
      return kind;
    }
  };
  if (needs.runs) {
    const bool trees = shape.queries <= shape.keys;
    DrawnMask found = draw_run_mask(random, shape,
                                    !trees       ? RunMasks::of_any_queries
                                    : !same_keys ? RunMasks::of_any_keys
                                                 : RunMasks::all);
    found.shape = drawn.shape;
    found.keys = drawn.keys;
    drawn = found;
    const AnyMask* mask = drawn.mask.get();
    definition.sees = [mask](const Query& q, index_t key) {
      const KeyRange range = ssmax::detail::visible_keys(*mask, q);
      return key >= range.begin && key < range.end && mask->sees(q, key);
    };
    definition.query_position = [mask](const Query& q) { return mask->query_position(q); };
    definition.key_position = [mask](const Query& q, index_t key) {
      return key < q.shape.keys ? mask->key_position(q, key) : key;
    };
  }
  switch (needs.runs ? -1 : choose()) {
    case -1:
      break;
    case 0:
      drawn.words = "Full";
      hold(drawn, ssmax::Full{});
      break;
    case 2: {
      auto of_rows = lengths(random, shape.rows(), shape.keys);
      drawn.words = "Lengths";
      hold(drawn, ssmax::Lengths(*of_rows), of_rows);
      definition.sees = [of_rows](const Query& q, index_t key) {
        return key < (*of_rows)[static_cast<std::size_t>(
                         (q.batch * q.shape.heads + q.head) * q.shape.queries + q.index)];
      };
      break;
    }
    case 3: {
      const ssmax::SlidingWindow w = window();
      hold(drawn, w);
      definition.sees = [=](const Query& q, index_t key) { return in_window(w, standing(q), key); };
      break;
    }
    case 4: {
      auto prefix = lengths(random, shape.batch, shape.keys);
      drawn.words = "PrefixLM";
      hold(drawn, ssmax::PrefixLM(*prefix), prefix);
      definition.sees = [=](const Query& q, index_t key) {
        return key < (*prefix)[static_cast<std::size_t>(q.batch)] || key <= standing(q);
      };
      break;
    }
    case 5: {
      auto held = lengths(random, shape.batch, shape.keys);
      const bool causal = random.chance(0.5);
      drawn.words = causal ? "KeyLengths & Causal" : "KeyLengths";
      if (causal) {
        hold(drawn, ssmax::KeyLengths(*held) & ssmax::Causal{}, held);
      } else {
        hold(drawn, ssmax::KeyLengths(*held), held);
      }
      definition.sees = [=](const Query& q, index_t key) {
        return key < (*held)[static_cast<std::size_t>(q.batch)] && (!causal || key <= standing(q));
      };
      break;
    }
    case 6: {
      const auto [mask, memory] = documents(random.chance(0.6));
      hold(drawn, mask, memory);
      break;
    }
    case 7: {
      const ssmax::SlidingWindow w = window();
      drawn.words += " & ";
      const auto [mask, memory] = documents(random.chance(0.6));
      hold(drawn, w & mask, memory);
      definition.sees = [=, own = definition.sees, at = definition.key_stood_at](
                            const Query& q, index_t key) { return own(q, key) && in_window(w, at(q), key); };
      break;
    }
    case 8:
      drawn.words = "the user's range, odd rows backwards and beyond the keys";
      hold(drawn, OwnRange{});
      definition.sees = [](const Query& q, index_t key) {
        const KeyRange range = OwnRange{}.keys(q);
        return key >= range.begin && key < range.end;
      };
      break;
    case 9:
      drawn.words = "the user's positions";
      hold(drawn, OwnPositions{});
      definition.sees = causal_sees;
      definition.query_position = [](const Query& q) { return OwnPositions{}.query_position(q); };
      definition.key_position = [](const Query& q, index_t key) {
        return OwnPositions{}.key_position(q, key);
      };
      break;
    case 10: {
      auto m = matrix();
      const bool causal = random.chance(0.4);
      drawn.words = (causal ? "Causal & MatrixMask" : "MatrixMask") + m->heads.words();
      const ssmax::MatrixMask<bool> mask = m->mask(m->shown.get());
      definition.sees = matrix_sees(m);
      if (causal) {
        hold(drawn, ssmax::Causal{} & mask, m);
        definition.sees = [own = definition.sees](const Query& q, index_t key) {
          return own(q, key) && key <= standing(q);
        };
      } else {
        hold(drawn, mask, m);
      }
      break;
    }
    case 11: {
      auto m = matrix();
      drawn.words = "MatrixMask of an additive mask" + m->heads.words();
      hold(drawn, m->mask(m->added.data()), m);
      definition.sees = matrix_sees(m);
      break;
    }
    case 12: {
      drawn.words = "Where";
      const index_t salt = random.between(0, 1000);
      const auto shown = [salt](const Query& q, index_t key) {
        return ((q.batch * 31 + q.head * 17 + q.index * 7 + key * 13 + salt) % 5) != 0;
      };
      hold(drawn, ssmax::Where(shown));
      definition.sees = shown;
      break;
    }
    case 13: {
      auto m = matrix();
      const auto [mask, memory] = documents(random.chance(0.6));
      drawn.words += " & MatrixMask" + m->heads.words();
      auto both =
          std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(m, memory);
      hold(drawn, mask & m->mask<bool>(m->shown.get()), both);
      definition.sees = [one = definition.sees, other = matrix_sees(m)](const Query& q, index_t key) {
        return one(q, key) && other(q, key);
      };
      break;
    }
    case 14:
      drawn.words = "the user's predicate";
      hold(drawn, OwnPredicate{});
      definition.sees = [](const Query& q, index_t key) {
        const KeyRange range = OwnRange{}.keys(q);
        return key >= range.begin && key < range.end && OwnPredicate{}.sees(q, key);
      };
      break;
    case 15:
      drawn.words = "the user's positions and predicate";
      hold(drawn, OwnPositionsAndPredicate{});
      definition.sees = [](const Query& q, index_t key) {
        return key <= standing(q) && OwnPredicate{}.sees(q, key);
      };
      definition.query_position = [](const Query& q) { return OwnPositions{}.query_position(q); };
      definition.key_position = [](const Query& q, index_t key) {
        return OwnPositions{}.key_position(q, key);
      };
      break;
    case 16: {
      const index_t size = random.between(1, shape.keys + 1);
      drawn.words = "Chunks(" + std::to_string(size) + ")";
      hold(drawn, ssmax::Chunks(size));
      definition.sees = [=](const Query& q, index_t key) {
        return key <= standing(q) && key / size == standing(q) / size;
      };
      break;
    }
    case 17:
      if (random.chance(0.5)) {
        hold(drawn, ssmax::CausalTopLeft{});
        definition.sees = [](const Query& q, index_t key) { return key <= q.index; };
      } else {
        const ssmax::SlidingWindow w = window();
        hold(drawn, w & ssmax::CausalTopLeft{});
        definition.sees = [=](const Query& q, index_t key) {
          return key <= q.index && in_window(w, q.index, key);
        };
        drawn.words += " & ";
      }
      drawn.words += "CausalTopLeft";
      definition.query_position = [](const Query& q) { return q.index; };
      break;
    default:
      drawn.words = "Causal";
      hold(drawn, ssmax::Causal{});
      definition.sees = causal_sees;
  }

  Query query;
  for (query.batch = 0; query.batch < shape.batch; ++query.batch) {
    query.shape = shape;
    query.shape.keys = keys[static_cast<std::size_t>(query.batch)];
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      for (query.index = 0; query.index < shape.queries; ++query.index) {
        for (index_t key = 0; key < shape.keys; ++key) {
          drawn.visible.push_back(key < query.shape.keys && definition.sees(query, key) ? 1 : 0);
        }
        drawn.of_query.push_back(definition.query_position ? definition.query_position(query)
                                                           : standing(query));
      }
    }
    query.head = query.index = 0;
    for (index_t key = 0; key < shape.keys; ++key) {
      drawn.of_key.push_back(definition.key_position ? definition.key_position(query, key) : key);
    }
  }
  return drawn;
}

}  // namespace fuzz
